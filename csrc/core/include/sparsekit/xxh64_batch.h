// XXH64 of short texts, several at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "sparsekit/xxh64.h"

namespace sparsekit {

struct ShortTexts {
  static constexpr int kMost = 256;       // so that a byte can number them
  static constexpr size_t kTooLong = 64;  // bytes

  const char* data[kMost];
  alignas(64) uint8_t sizes[kMost + 8];
};

inline void prefetch(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#else
  (void)address;
#endif
}

// codes[k] = XXH64 of text k, for k in [0, count). No byte beyond a text is read. Meanwhile the
// caches are asked for two lines of each of the objects `soon`, which the caller reads next.
void hash_short_texts(const ShortTexts& texts, int count, uint64_t seed, int64_t* codes,
                      const void* const* soon = nullptr, int num_soon = 0);

// Whether AVX-512 is used where the processor has it, which tests switch off. Returns whether it is
// from now on.
bool use_xxh64_avx512(bool wanted);
bool uses_xxh64_avx512();

// codes[i] = XXH64 of texts(i), a string_view, for i in [begin, end).
template <class Texts>
void hash_texts(const Texts& texts, int64_t begin, int64_t end, uint64_t seed, int64_t* codes) {
  ShortTexts batch;
  for (; begin < end; begin += ShortTexts::kMost) {
    const int count = static_cast<int>(std::min<int64_t>(ShortTexts::kMost, end - begin));
    bool any_too_long = false;
    for (int k = 0; k < count; ++k) {
      const auto text = texts(begin + k);
      const bool too_long = text.size() >= ShortTexts::kTooLong;
      any_too_long |= too_long;
      batch.data[k] = text.data();
      batch.sizes[k] = too_long ? 0 : static_cast<uint8_t>(text.size());
      prefetch(text.data());
    }
    hash_short_texts(batch, count, seed, codes + begin);
    for (int k = 0; any_too_long && k < count; ++k) {
      const auto text = texts(begin + k);
      if (text.size() < ShortTexts::kTooLong) continue;
      codes[begin + k] = static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
    }
  }
}

}  // namespace sparsekit
