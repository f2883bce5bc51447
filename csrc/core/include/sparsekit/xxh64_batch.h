// XXH64 of many texts. Texts of one length are hashed together: no branch depends on a length that
// cannot be predicted, and the multiplications of one text overlap with those of others.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "sparsekit/xxh64.h"

namespace sparsekit {

// A text whose code goes to codes[place].
struct WaitingText {
  const char* data;
  int64_t place;
};

constexpr int kTogether = 32;    // texts of one length that are hashed together
constexpr int kFew = 5;          // fewer are hashed one by one
constexpr size_t kTooLong = 64;  // bytes; such a text does not wait for others

// Prefetch distances ahead of the current text, in codes and in bytes of text.
constexpr size_t kCodesAhead = 256;
constexpr size_t kBytesAhead = 1024;

// Hashes `count` texts of `size` bytes each, fewer than kTooLong. Reads no byte beyond a text. An
// engine works in steps of several texts, so there must be kTogether of them, if only copies.
using HashTogether = void (*)(const WaitingText* texts, int count, size_t size, uint64_t seed,
                              int64_t* codes);

// Selects the engine, for tests: "avx512", "avx2" or "portable", or the next one that the processor
// has. Returns the name of what is used from now on, or null if there is no such engine.
const char* use_xxh64_engine(const char* wanted);
HashTogether xxh64_engine();

// `address` need not be valid.
inline void prefetch(uintptr_t address) {
#if defined(__GNUC__)
  __builtin_prefetch(reinterpret_cast<const void*>(address));
#else
  (void)address;
#endif
}
inline void prefetch(const void* address, size_t ahead) {
  prefetch(reinterpret_cast<uintptr_t>(address) + ahead);
}

// Hashes texts as enough of one length have come together.
class TextHasher {
 public:
  TextHasher(uint64_t seed, int64_t* codes) : seed_(seed), codes_(codes) {
    for (size_t size = 0; size < kTooLong; ++size) end_[size] = waiting_[size];
  }

  // codes[place] = XXH64 of the text, which must stay where it is until flush().
  void add(const char* text, size_t size, int64_t place) {
    if (size >= kTooLong) {
      codes_[place] = static_cast<int64_t>(xxh64(text, size, seed_));
      return;
    }
    WaitingText* end = end_[size];
    *end++ = {text, place};
    // Each row of waiting_ is aligned to its size.
    if (reinterpret_cast<uintptr_t>(end) % sizeof waiting_[0] == 0) {
      end -= kTogether;
      hash_together_(end, kTogether, size, seed_, codes_);
    }
    end_[size] = end;
  }

  // Hashes all texts that still wait.
  void flush() {
    for (size_t size = 0; size < kTooLong; ++size) flush(size);
  }

 private:
  void flush(size_t size) {
    WaitingText* const texts = waiting_[size];
    const auto count = static_cast<int>(end_[size] - texts);
    if (count >= kFew) {
      std::fill(end_[size], texts + kTogether, end_[size][-1]);
      hash_together_(texts, count, size, seed_, codes_);
    } else {
      for (int k = 0; k < count; ++k) {
        codes_[texts[k].place] = static_cast<int64_t>(xxh64(texts[k].data, size, seed_));
      }
    }
    end_[size] = texts;
  }

  const uint64_t seed_;
  int64_t* const codes_;
  const HashTogether hash_together_ = xxh64_engine();
  WaitingText* end_[kTooLong];
  alignas(kTogether * sizeof(WaitingText)) WaitingText waiting_[kTooLong][kTogether];
};

// codes[i] = XXH64 of texts(i), a string_view, for i in all the ranges that ranges.next() gives.
template <class Texts, class Ranges>
void hash_texts(const Texts texts, Ranges& ranges, uint64_t seed, int64_t* codes) {
  TextHasher hasher(seed, codes);
  for (int64_t i = 0, end = 0; ranges.next(&i, &end);) {
    for (; i < end; ++i) {
      const auto text = texts(i);
      // Texts mostly lie one behind the other, but since they are hashed out of order, the
      // processor does not see that by itself.
      prefetch(text.data(), kBytesAhead);
      prefetch(codes + i, kCodesAhead * sizeof *codes);
      hasher.add(text.data(), text.size(), i);
    }
  }
  hasher.flush();
}

}  // namespace sparsekit
