#include "cpu/xxh64_avx512.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "sparsekit/xxh64_steps.h"

// The rest of the module is for every x86-64, so these instructions are asked for by function.
#define SPARSEKIT_AVX512 \
  __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx512vbmi2,bmi,bmi2,popcnt")))
#define SPARSEKIT_AVX512_INLINE SPARSEKIT_AVX512 __attribute__((always_inline)) inline

namespace sparsekit::xxh64_avx512 {
namespace {

using namespace xxh64_steps;
using Lanes = __m512i;

// Registers of lanes that go through a step together, since a step waits long for its products.
constexpr int kSide = 4;
constexpr int kStep = 8 * kSide;

struct Numbers {
  alignas(64) uint8_t values[64] = {};
  constexpr Numbers() {
    for (int k = 0; k < 64; ++k) values[k] = static_cast<uint8_t>(k);
  }
};
constexpr Numbers kNumbers;

SPARSEKIT_AVX512_INLINE Lanes all(uint64_t x) {
  return _mm512_set1_epi64(static_cast<long long>(x));
}
SPARSEKIT_AVX512_INLINE Lanes add(Lanes a, Lanes b) {
  return _mm512_add_epi64(a, b);
}
SPARSEKIT_AVX512_INLINE Lanes times(Lanes a, uint64_t b) {
  return _mm512_mullo_epi64(a, all(b));
}
SPARSEKIT_AVX512_INLINE Lanes bits_xor(Lanes a, Lanes b) {
  return _mm512_xor_si512(a, b);
}
SPARSEKIT_AVX512_INLINE Lanes bits_and(Lanes a, uint64_t b) {
  return _mm512_and_si512(a, all(b));
}

SPARSEKIT_AVX512_INLINE Lanes load(__mmask8 which, Lanes address) {
  return _mm512_mask_i64gather_epi64(_mm512_setzero_si512(), which, address, nullptr, 1);
}

SPARSEKIT_AVX512_INLINE Lanes eight_numbers(const uint8_t* order) {
  return _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(order)));
}

SPARSEKIT_AVX512_INLINE Lanes absorb(Lanes accumulator, Lanes word) {
  return times(_mm512_rol_epi64(add(accumulator, times(word, kPrime2)), 31), kPrime1);
}

SPARSEKIT_AVX512_INLINE Lanes merge(Lanes hash, Lanes accumulator) {
  const Lanes word = absorb(_mm512_setzero_si512(), accumulator);
  return add(times(bits_xor(hash, word), kPrime1), all(kPrime4));
}

SPARSEKIT_AVX512_INLINE Lanes hash_stripe(__mmask8 which, Lanes at, uint64_t seed) {
  const Lanes a = absorb(all(seed + kPrime1 + kPrime2), load(which, at));
  const Lanes b = absorb(all(seed + kPrime2), load(which, add(at, all(8))));
  const Lanes c = absorb(all(seed), load(which, add(at, all(16))));
  const Lanes d = absorb(all(seed - kPrime1), load(which, add(at, all(24))));
  const Lanes hash = add(add(_mm512_rol_epi64(a, 1), _mm512_rol_epi64(b, 7)),
                         add(_mm512_rol_epi64(c, 12), _mm512_rol_epi64(d, 18)));
  return merge(merge(merge(merge(hash, a), b), c), d);
}

// Writes the numbers of the texts to `order` by size / 4, and the last again up to a whole step.
SPARSEKIT_AVX512_INLINE void sort_by_size(const ShortTexts& texts, int count, uint8_t* order) {
  const Lanes first_numbers = _mm512_load_si512(kNumbers.values);
  int done = 0;
  for (int size = 0; done < count; size += 4) {
    for (int k = 0; k < count; k += 64) {
      const __mmask64 there = _bzhi_u64(~uint64_t{0}, count - k < 64 ? count - k : 64);
      const Lanes class_of = bits_and(_mm512_load_si512(texts.sizes + k), 0x3C3C3C3C3C3C3C3C);
      const __mmask64 same =
          _mm512_mask_cmpeq_epi8_mask(there, class_of, _mm512_set1_epi8(static_cast<char>(size)));
      const Lanes numbers = _mm512_add_epi8(first_numbers, _mm512_set1_epi8(static_cast<char>(k)));
      _mm512_storeu_si512(order + done, _mm512_maskz_compress_epi8(same, numbers));
      done += static_cast<int>(_mm_popcnt_u64(same));
    }
  }
  _mm512_storeu_si512(order + count, _mm512_set1_epi8(static_cast<char>(order[count - 1])));
}

SPARSEKIT_AVX512_INLINE bool all_of_one_size(const ShortTexts& texts, int count) {
  const Lanes size = _mm512_set1_epi8(static_cast<char>(texts.sizes[0]));
  for (int k = 0; k < count; k += 64) {
    const __mmask64 there = _bzhi_u64(~uint64_t{0}, count - k < 64 ? count - k : 64);
    if (_mm512_mask_cmpneq_epi8_mask(there, _mm512_load_si512(texts.sizes + k), size) != 0) {
      return false;
    }
  }
  return true;
}

// The last size % 8 bytes of texts in the low bytes of their lanes.
SPARSEKIT_AVX512_INLINE Lanes load_rest(const ShortTexts& texts, const uint8_t* order, Lanes data,
                                        Lanes size, bool any_below_8) {
  const __mmask8 which = _mm512_cmpge_epu64_mask(size, all(8));
  const Lanes last = load(which, add(add(data, size), all(uint64_t(-8))));
  // By 8 - size % 8 bytes, which may be all.
  const Lanes bits = _mm512_andnot_si512(_mm512_slli_epi64(size, 3), all(56));
  Lanes rest = _mm512_srlv_epi64(_mm512_srli_epi64(last, 8), bits);
  if (any_below_8) {
    alignas(64) long long words[8];
    for (int j = 0; j < 8; ++j) {
      const unsigned size_j = texts.sizes[order[j]];
      const __mmask16 bytes = size_j < 8 ? (1u << size_j) - 1 : 0;
      words[j] = _mm_cvtsi128_si64(_mm_maskz_loadu_epi8(bytes, texts.data[order[j]]));
    }
    rest = _mm512_or_si512(rest, _mm512_load_si512(words));
  }
  return rest;
}

// Eight of the objects that are read next. A few at a time, since the loads of this step wait for
// those before them.
SPARSEKIT_AVX512_INLINE void prefetch_eight(const void* const* soon, int from, int num_soon) {
  for (int j = from; j < from + 8 && j < num_soon; ++j) {
    prefetch(soon[j]);
    prefetch(static_cast<const char*>(soon[j]) + 48);
  }
}

// kStep texts of similar sizes, the first the shortest.
SPARSEKIT_AVX512_INLINE void hash_step(const ShortTexts& texts, const uint8_t* order, bool uniform,
                                       uint64_t seed, int64_t* codes, const void* const* soon,
                                       int first, int num_soon) {
  prefetch_eight(soon, first, num_soon);
  const uint32_t least = texts.sizes[order[0]];
  const uint32_t most = texts.sizes[order[kStep - 1]];
  Lanes data[kSide], size[kSide], hash[kSide], rest[kSide];
#pragma GCC unroll 4
  for (int g = 0; g < kSide; ++g) {
    const Lanes numbers = eight_numbers(order + 8 * g);
    data[g] = _mm512_i64gather_epi64(numbers, texts.data, 8);
    size[g] = bits_and(_mm512_i64gather_epi64(numbers, texts.sizes, 1), 0xFF);
    hash[g] = all(seed + kPrime5);
    rest[g] = load_rest(texts, order + 8 * g, data[g], size[g], least < 8);
  }
  if (most >= 32) {
#pragma GCC unroll 4
    for (int g = 0; g < kSide; ++g) {
      const __mmask8 which = _mm512_cmpge_epu64_mask(size[g], all(32));
      hash[g] = _mm512_mask_mov_epi64(hash[g], which, hash_stripe(which, data[g], seed));
      data[g] = _mm512_mask_add_epi64(data[g], which, data[g], all(32));
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < kSide; ++g) hash[g] = add(hash[g], size[g]);

  prefetch_eight(soon, first + 8, num_soon);
  const uint32_t words = most >= 32 && least < 32 ? 3 : most % 32 / 8;
  for (uint32_t w = 0; w < words; ++w) {
#pragma GCC unroll 4
    for (int g = 0; g < kSide; ++g) {
      const __mmask8 which = _mm512_cmpgt_epu64_mask(bits_and(size[g], 31), all(8 * w + 7));
      const Lanes word = load(which, add(data[g], all(8 * w)));
      const Lanes mixed = bits_xor(hash[g], absorb(_mm512_setzero_si512(), word));
      hash[g] = _mm512_mask_add_epi64(hash[g], which, times(_mm512_rol_epi64(mixed, 27), kPrime1),
                                      all(kPrime4));
    }
  }
  if (least / 4 != most / 4 || most % 8 >= 4) {
#pragma GCC unroll 4
    for (int g = 0; g < kSide; ++g) {
      const __mmask8 which = _mm512_test_epi64_mask(size[g], all(4));
      const Lanes mixed = bits_xor(hash[g], times(bits_and(rest[g], 0xFFFFFFFF), kPrime1));
      hash[g] = _mm512_mask_add_epi64(hash[g], which, times(_mm512_rol_epi64(mixed, 23), kPrime2),
                                      all(kPrime3));
      rest[g] = _mm512_mask_srli_epi64(rest[g], which, rest[g], 32);
    }
  }
  prefetch_eight(soon, first + 16, num_soon);
  const uint32_t bytes = uniform ? most % 4 : 3;
  for (uint32_t b = 0; b < bytes; ++b) {
#pragma GCC unroll 4
    for (int g = 0; g < kSide; ++g) {
      const __mmask8 which = _mm512_cmpgt_epu64_mask(bits_and(size[g], 3), all(b));
      const Lanes mixed = bits_xor(hash[g], times(bits_and(rest[g], 0xFF), kPrime5));
      hash[g] = _mm512_mask_mullo_epi64(hash[g], which, _mm512_rol_epi64(mixed, 11), all(kPrime1));
      rest[g] = _mm512_srli_epi64(rest[g], 8);
    }
  }
  prefetch_eight(soon, first + 24, num_soon);
#pragma GCC unroll 4
  for (int g = 0; g < kSide; ++g) {
    Lanes h = times(bits_xor(hash[g], _mm512_srli_epi64(hash[g], 33)), kPrime2);
    h = times(bits_xor(h, _mm512_srli_epi64(h, 29)), kPrime3);
    h = bits_xor(h, _mm512_srli_epi64(h, 32));
    _mm512_i64scatter_epi64(codes, eight_numbers(order + 8 * g), h, 8);
  }
}

}  // namespace

bool is_supported() {
  return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi2") &&
         __builtin_cpu_supports("bmi2");
}

SPARSEKIT_AVX512 void hash_short_texts(const ShortTexts& texts, int count, uint64_t seed,
                                       int64_t* codes, const void* const* soon, int num_soon) {
  if (count == 0) return;
  uint8_t order[ShortTexts::kMost + 64];
  sort_by_size(texts, count, order);
  const bool uniform = all_of_one_size(texts, count);
  for (int k = 0; k < count; k += kStep) {
    hash_step(texts, order + k, uniform, seed, codes, soon, k, num_soon);
  }
}

SPARSEKIT_AVX512 char* put_latin1(const uint8_t* text, size_t size, char* out) {
  for (size_t left = size; left != 0;) {
    const unsigned step = left < 32 ? static_cast<unsigned>(left) : 32;
    const __mmask32 there = _bzhi_u32(~0u, step);
    const __m256i points = _mm256_maskz_loadu_epi8(there, text);
    const __mmask32 beyond = _mm256_movepi8_mask(points);
    // Two bytes for each, of which the second counts beyond ASCII.
    const Lanes one = _mm512_cvtepu8_epi16(points);
    const Lanes second = _mm512_slli_epi16(_mm512_and_si512(one, _mm512_set1_epi16(0x3F)), 8);
    const Lanes both = _mm512_or_si512(_mm512_or_si512(_mm512_srli_epi16(one, 6), second),
                                       _mm512_set1_epi16(static_cast<short>(0x80C0)));
    const uint64_t bytes =
        _pdep_u64(there, 0x5555555555555555u) | _pdep_u64(beyond, 0xAAAAAAAAAAAAAAAAu);
    const Lanes wide = _mm512_mask_mov_epi16(one, beyond, both);
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi8(bytes, wide));
    out += _mm_popcnt_u64(bytes);
    text += step;
    left -= step;
  }
  return out;
}

}  // namespace sparsekit::xxh64_avx512

#else

namespace sparsekit::xxh64_avx512 {

bool is_supported() {
  return false;
}
void hash_short_texts(const ShortTexts&, int, uint64_t, int64_t*, const void* const*, int) {}
char* put_latin1(const uint8_t*, size_t, char*) {
  return nullptr;
}

}  // namespace sparsekit::xxh64_avx512

#endif
