// The kernels of pool_kernels.h. pool_generic.cpp, pool_avx2.cpp and pool_avx512.cpp each include
// this file in their own namespace, and are compiled with their own flags. This file calls no
// inline functions from other headers: the linker keeps one copy of such a function, which might be
// the one for AVX-512.

#if defined(__AVX512F__)
constexpr int kMostLanes = 16;
#elif defined(__AVX2__)
constexpr int kMostLanes = 8;
#else
constexpr int kMostLanes = 4;
#endif
// Maximum number of SIMD vectors of sums that a loop keeps in registers.
constexpr int kMostVectors = 8;

template <int kLanes>
struct VectorsOf {
  typedef float Floats __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));
};
template <>
struct VectorsOf<1> {
  using Floats = float;
  using Ints = int32_t;
};
template <int kLanes>
using Floats = typename VectorsOf<kLanes>::Floats;
template <int kLanes>
using Ints = typename VectorsOf<kLanes>::Ints;

template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

template <class T>
inline T read(const void* bytes) {
  T value;
  __builtin_memcpy(&value, bytes, sizeof value);
  return value;
}

template <int kLanes>
inline Floats<kLanes> to_floats(Ints<kLanes> numbers) {
  if constexpr (kLanes == 1) {
    return static_cast<float>(numbers);
  } else {
    return __builtin_convertvector(numbers, Floats<kLanes>);
  }
}

// ---- widening 4, 8 and 16-bit integers to 32; GCC 12 does it poorly for vector types ----

#ifdef __SSE2__
template <int kBytes>
inline __m128i load_bytes(const uint8_t* bytes) {
  if constexpr (kBytes == 16) return read<__m128i>(bytes);
  if constexpr (kBytes == 8) return _mm_cvtsi64_si128(read<int64_t>(bytes));
  if constexpr (kBytes == 4) return _mm_cvtsi32_si128(read<int32_t>(bytes));
  return _mm_cvtsi32_si128(read<uint16_t>(bytes));
}

template <int kLanes>
inline Ints<kLanes> widen(__m128i bytes) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) return reinterpret_cast<Ints<16>>(_mm512_cvtepu8_epi32(bytes));
#endif
#ifdef __AVX2__
  if constexpr (kLanes == 8) return reinterpret_cast<Ints<8>>(_mm256_cvtepu8_epi32(bytes));
#endif
  if constexpr (kLanes == 4) {
    const __m128i zeros = _mm_setzero_si128();
    return reinterpret_cast<Ints<4>>(_mm_unpacklo_epi16(_mm_unpacklo_epi8(bytes, zeros), zeros));
  }
}
#endif

template <int kLanes>
inline Ints<kLanes> widen8(const uint8_t* bytes) {
  if constexpr (kLanes == 1) {
    return bytes[0];
  } else {
#ifdef __SSE2__
    return widen<kLanes>(load_bytes<kLanes>(bytes));
#else
    return Ints<kLanes>{bytes[0], bytes[1], bytes[2], bytes[3]};
#endif
  }
}

// Widens kLanes numbers, starting at `column`, which must be even if kLanes is above 1.
template <int kLanes>
inline Ints<kLanes> widen4(const uint8_t* row, int64_t column) {
  const uint8_t* pairs = row + column / 2;
  if constexpr (kLanes == 1) {
    return (pairs[0] >> (column % 2 * 4)) & 15;
  } else {
#ifdef __SSE2__
    const __m128i bytes = load_bytes<kLanes / 2>(pairs), low = _mm_set1_epi8(15);
    return widen<kLanes>(
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low)));
#else
    return Ints<kLanes>{pairs[0] & 15, pairs[0] >> 4, pairs[1] & 15, pairs[1] >> 4};
#endif
  }
}

template <int kLanes>
inline Ints<kLanes> widen16(const uint8_t* bytes) {
  if constexpr (kLanes == 1) {
    return read<uint16_t>(bytes);
  } else {
#ifdef __AVX512F__
    if constexpr (kLanes == 16) {
      return reinterpret_cast<Ints<16>>(_mm512_cvtepu16_epi32(read<__m256i>(bytes)));
    }
#endif
#ifdef __AVX2__
    if constexpr (kLanes == 8) {
      return reinterpret_cast<Ints<8>>(_mm256_cvtepu16_epi32(load_bytes<16>(bytes)));
    }
#endif
    if constexpr (kLanes == 4) {
#ifdef __SSE2__
      return reinterpret_cast<Ints<4>>(
          _mm_unpacklo_epi16(load_bytes<8>(bytes), _mm_setzero_si128()));
#else
      return Ints<kLanes>{read<uint16_t>(bytes), read<uint16_t>(bytes + 2),
                          read<uint16_t>(bytes + 4), read<uint16_t>(bytes + 6)};
#endif
    }
  }
}

// Converts a float16, exactly. NaNs become quiet, as in the processor's own conversion.
inline float from_half(uint16_t half) {
#ifdef __F16C__
  return _cvtsh_ss(half);
#else
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3FF;
  if (exponent == 0) {
    const float tiny = static_cast<float>(mantissa) * 0x1p-24f;
    return sign == 0 ? tiny : -tiny;
  }
  uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
  if (exponent == 31) bits = sign | 0x7F800000 | mantissa << 13 | (mantissa != 0 ? 0x400000 : 0);
  return read<float>(&bits);
#endif
}

// ---- formats: load(row, column) reads adjacent numbers in a row, as they are stored ----

struct Float32 {
  static constexpr int kBits = 32;
  template <int kLanes>
  static Floats<kLanes> load(const uint8_t* row, int64_t column) {
    return read<Floats<kLanes>>(row + 4 * column);
  }
};

struct BFloat16 {
  static constexpr int kBits = 16;
  template <int kLanes>
  static Floats<kLanes> load(const uint8_t* row, int64_t column) {
    if constexpr (kLanes == 1) {
      const uint32_t bits = uint32_t{read<uint16_t>(row + 2 * column)} << 16;
      return read<float>(&bits);
    } else {
      const Ints<kLanes> bits = widen16<kLanes>(row + 2 * column) << 16;
      return read<Floats<kLanes>>(&bits);
    }
  }
};

struct Float16 {
  static constexpr int kBits = 16;
  template <int kLanes>
  static Floats<kLanes> load(const uint8_t* row, int64_t column) {
    const uint8_t* halves = row + 2 * column;
    if constexpr (kLanes == 1) {
      return from_half(read<uint16_t>(halves));
#if defined(__AVX512F__)
    } else if constexpr (kLanes == 16) {
      return _mm512_cvtph_ps(read<__m256i>(halves));
#endif
#if defined(__F16C__)
    } else if constexpr (kLanes == 8) {
      return _mm256_cvtph_ps(read<__m128i>(halves));
    } else if constexpr (kLanes == 4) {
      return _mm_cvtph_ps(_mm_cvtsi64_si128(read<int64_t>(halves)));
#endif
    } else {
      return Floats<kLanes>{
          from_half(read<uint16_t>(halves)), from_half(read<uint16_t>(halves + 2)),
          from_half(read<uint16_t>(halves + 4)), from_half(read<uint16_t>(halves + 6))};
    }
  }
};

struct Int8 {
  static constexpr int kBits = 8;
  template <int kLanes>
  static Floats<kLanes> load(const uint8_t* row, int64_t column) {
    return to_floats<kLanes>(widen8<kLanes>(row + column));
  }
};

struct Int4 {
  static constexpr int kBits = 4;
  template <int kLanes>
  static Floats<kLanes> load(const uint8_t* row, int64_t column) {
    return to_floats<kLanes>(widen4<kLanes>(row, column));
  }
};

// A row, with its scale and bias if its format has them.
template <class Format>
struct Row {
  static constexpr bool kQuantised = Format::kBits < 16;
  const uint8_t* bytes;
  float scale = 1, bias = 0;

  Row(const uint8_t* bytes, int64_t dim) : bytes(bytes) {
    if constexpr (kQuantised) {
      const uint8_t* numbers_end = bytes + (dim * Format::kBits + 7) / 8;
      scale = from_half(read<uint16_t>(numbers_end));
      bias = from_half(read<uint16_t>(numbers_end + 2));
    }
  }

  template <int kLanes>
  Floats<kLanes> at(int64_t column) const {
    const Floats<kLanes> stored = Format::template load<kLanes>(bytes, column);
    if constexpr (kQuantised) {
      return scale * stored + bias;
    } else {
      return stored;
    }
  }
};

// ---- loops over rows, for a block of kVectors * kLanes columns ----

// The rows in a run, and their weights, if any.
struct Run {
  const uint8_t* const* rows;
  const float* weights;
  int64_t n;
  int64_t dim;
};

template <class Format, int kLanes, int kVectors, bool kWeighted>
inline void sum_block(const Run& run, int64_t column, float* out, bool add) {
  Floats<kLanes> sums[kVectors] = {};
  for (int64_t i = 0; i < run.n; ++i) {
    if (run.rows[i] == nullptr) continue;
    const Row<Format> row(run.rows[i], run.dim);
    const float weight = kWeighted ? run.weights[i] : 1;
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Floats<kLanes> x = row.template at<kLanes>(column + v * kLanes);
      sums[v] += kWeighted ? weight * x : x;
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    float* to = out + column + v * kLanes;
    if (add) sums[v] = read<Floats<kLanes>>(to) + sums[v];
    __builtin_memcpy(to, &sums[v], sizeof sums[v]);
  }
}

template <class Format, int kLanes, int kVectors>
inline void max_block(const Run& run, int64_t column, float* out, bool with_out) {
  Floats<kLanes> most[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t at = column + v * kLanes;
    most[v] = with_out ? read<Floats<kLanes>>(out + at)
                       : Row<Format>(run.rows[0], run.dim).template at<kLanes>(at);
  }
  for (int64_t i = with_out ? 0 : 1; i < run.n; ++i) {
    const Row<Format> row(run.rows[i], run.dim);
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Floats<kLanes> x = row.template at<kLanes>(column + v * kLanes);
      // A NaN is the only number that differs from itself.
      if constexpr (kLanes == 1) {
        most[v] = (x > most[v]) | ((x != x) & (most[v] == most[v])) ? x : most[v];
      } else {
        most[v] = ((x > most[v]) | ((x != x) & (most[v] == most[v]))) ? x : most[v];
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    __builtin_memcpy(out + column + v * kLanes, &most[v], sizeof most[v]);
  }
}

// Calls block(lanes, vectors) for as many of the remaining columns as registers can hold, and
// returns how many columns that was.
template <int kLanes = kMostLanes, int kVectors = kMostVectors, class Block>
inline int64_t with_block(int64_t width, const Block& block) {
  if (width >= kLanes * kVectors) {
    block(Number<kLanes>{}, Number<kVectors>{});
    return kLanes * kVectors;
  }
  if constexpr (kVectors > 1) {
    return with_block<kLanes, kVectors / 2>(width, block);
  } else if constexpr (kLanes > 4) {
    return with_block<kLanes / 2, 1>(width, block);
  } else if constexpr (kLanes > 1) {
    return with_block<1, 1>(width, block);
  }
  return 0;
}

template <class Format, bool kWeighted>
inline void sum_run(const Run& run, float* out, bool add) {
  for (int64_t column = 0; column < run.dim;) {
    column += with_block(run.dim - column, [&](auto lanes, auto vectors) {
      sum_block<Format, lanes.value, vectors.value, kWeighted>(run, column, out, add);
    });
  }
}

template <class Format>
inline void max_run(const Run& run, float* out, bool with_out) {
  for (int64_t column = 0; column < run.dim;) {
    column += with_block(run.dim - column, [&](auto lanes, auto vectors) {
      max_block<Format, lanes.value, vectors.value>(run, column, out, with_out);
    });
  }
}

// Divides like divided() in csrc/core/cpu/bags.h.
inline void divide(float* out, int64_t dim, float by) {
  if (by == 1) return;
  for (int64_t column = 0; column < dim;) {
    column += with_block<kMostLanes, 1>(dim - column, [&](auto lanes, auto) {
      const Floats<lanes.value> x = read<Floats<lanes.value>>(out + column);
      const Floats<lanes.value> divided = by == 0 ? Floats<lanes.value>{} : x / by;
      __builtin_memcpy(out + column, &divided, sizeof divided);
    });
  }
}

// Like total_weight() in csrc/core/cpu/bags.h, but for one run.
inline float total_weight(const float* weights, int64_t n, int32_t combiner) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    sum += combiner == SK_MEAN ? weights[i] : weights[i] * weights[i];
  }
  return sum;
}

template <class Format, bool kWeighted>
void pool_bags(const PoolBags& bags, int64_t begin, const int32_t* ends, int64_t num_bags,
               float* out) {
  const bool is_max = bags.combiner == SK_MAX;
  for (int64_t b = 0; b < num_bags; ++b, out += bags.stride) {
    const int64_t end = ends[b];
    if (begin == end) {
      __builtin_memset(out, 0, sizeof(float) * static_cast<size_t>(bags.dim));
      continue;
    }
    float weight = 0;
    bool go_on = bags.go_on;
    for (int64_t first = begin; first < end; first += kSumRun, go_on = true) {
      const int64_t n = end - first < kSumRun ? end - first : kSumRun;
      const float* weights = kWeighted ? bags.weights + first : nullptr;
      const Run run{bags.rows + first, weights, n, bags.dim};
      if (is_max) {
        max_run<Format>(run, out, go_on);
      } else {
        sum_run<Format, kWeighted>(run, out, go_on);
        if (kWeighted) weight += total_weight(weights, n, bags.combiner);
      }
    }
    if (bags.combiner == SK_MEAN || bags.combiner == SK_SQRTN) {
      const float total = kWeighted ? weight : static_cast<float>(end - begin);
      divide(out, bags.dim, bags.combiner == SK_MEAN ? total : __builtin_sqrtf(total));
    }
    begin = end;
  }
}

template <class Format>
void decode_row(const uint8_t* bytes, int64_t dim, int64_t begin, int64_t end, float* out) {
  const Row<Format> row(bytes, dim);
  for (int64_t column = begin; column < end;) {
    column += with_block<kMostLanes, 1>(end - column, [&](auto lanes, auto) {
      const Floats<lanes.value> x = row.template at<lanes.value>(column);
      __builtin_memcpy(out + (column - begin), &x, sizeof x);
    });
  }
}

// Calls use() with an instance of the row format's struct.
template <class Use>
inline void with_format(int32_t row_format, const Use& use) {
  switch (row_format) {
    case SK_FLOAT32:
      return use(Float32{});
    case SK_FLOAT16:
      return use(Float16{});
    case SK_BFLOAT16:
      return use(BFloat16{});
    case SK_INT8:
      return use(Int8{});
    case SK_INT4:
      return use(Int4{});
  }
}

void decode(int32_t row_format, const uint8_t* row, int64_t dim, int64_t begin, int64_t end,
            float* out) {
  with_format(row_format,
              [&](auto format) { decode_row<decltype(format)>(row, dim, begin, end, out); });
}

void pool(const PoolBags& bags, int64_t begin, const int32_t* ends, int64_t num_bags, float* out) {
  if (bags.combiner == SK_NONE) {
    for (int64_t b = 0; b < num_bags; ++b, out += bags.stride) {
      if (begin == ends[b]) {
        __builtin_memset(out, 0, sizeof(float) * static_cast<size_t>(bags.dim));
      } else {
        decode(bags.row_format, bags.rows[begin], bags.dim, 0, bags.dim, out);
      }
      begin = ends[b];
    }
    return;
  }
  with_format(bags.row_format, [&](auto format) {
    using Format = decltype(format);
    if (bags.weights != nullptr) {
      pool_bags<Format, true>(bags, begin, ends, num_bags, out);
    } else {
      pool_bags<Format, false>(bags, begin, ends, num_bags, out);
    }
  });
}

// ---- search ----

// Same as Bucket in sparsekit/hash_table.h.
struct Line {
  int64_t keys[5];
  int32_t rows[5];
  int32_t spilled;
};

// Returns a mask of the slots that have this key. Empty slots match key 0, too, but they follow all
// used slots.
inline uint32_t match(const Line& line, int64_t key) {
#if defined(__AVX512F__)
  return _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(&line), _mm512_set1_epi64(key)) & 31U;
#elif defined(__AVX2__)
  const __m256i equal = _mm256_cmpeq_epi64(read<__m256i>(line.keys), _mm256_set1_epi64x(key));
  const auto mask = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  return mask | static_cast<uint32_t>(line.keys[4] == key) << 4;
#else
  uint32_t mask = 0;
  for (int slot = 0; slot < 5; ++slot)
    mask |= static_cast<uint32_t>(line.keys[slot] == key) << slot;
  return mask;
#endif
}

// Returns the row of a key, or -1. The number of steps is bounded, so that the search ends even in
// a damaged index.
inline int64_t row_of(const RowIndex& index, int64_t key, int64_t bucket) {
  const auto* lines = static_cast<const Line*>(index.buckets);
  for (int64_t step = 0; step < index.num_buckets; ++step) {
    const Line& line = lines[bucket];
    const uint32_t slots = match(line, key);
    if (slots != 0) {
      const int32_t row = line.rows[__builtin_ctz(slots)];
      if (row >= 0) return row < index.row_limit ? row : -1;
    }
    if (line.spilled <= 0) return -1;
    bucket = bucket + 1 == index.num_buckets ? 0 : bucket + 1;
  }
  return -1;
}

// Maximum number of bytes to prefetch per row. The processor itself prefetches those that follow.
constexpr int64_t kAskedBytes = 512;

int64_t find(const RowIndex& index, const int64_t* keys, const int64_t* homes, int64_t n,
             const uint8_t** rows) {
  const int64_t asked = index.row_bytes < kAskedBytes ? index.row_bytes : kAskedBytes;
  int64_t missed = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = row_of(index, keys[i], homes[i]);
    if (row < 0) {
      rows[i] = nullptr;
      ++missed;
      continue;
    }
    const uint8_t* bytes = index.rows + row * index.row_bytes;
    rows[i] = bytes;
    for (int64_t at = 0; at < asked; at += 64) __builtin_prefetch(bytes + at, 0, 2);
    __builtin_prefetch(bytes + asked - 1, 0, 2);
  }
  return missed;
}
