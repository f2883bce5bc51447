// Computes XXH64, the 64-bit hash of the xxHash family, for one string or many. Follows the xxHash
// fast digest algorithm specification (Y. Collet, version 0.1.1 and later). Strings of equal length
// are hashed together: this avoids unpredictable branches on the length, and lets the
// multiplications for different strings overlap.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace sparsekit {

// Returns the XXH64 of the `length` bytes at `data`. `data` needs no alignment, and may be null if
// `length` is 0. Equal bytes and seeds give equal results on every machine, whatever its byte
// order. Takes O(length) time, allocates nothing and is safe to call from any thread. This is not a
// cryptographic hash: anyone who chooses the bytes can choose the hash.
uint64_t xxh64(const void* data, size_t length, uint64_t seed);

// A string whose hash is to be written to codes[place].
struct WaitingText {
  const char* data;
  int64_t place;
};

constexpr int kTogether = 32;    // number of strings of equal length hashed together
constexpr int kFew = 5;          // fewer strings than this are hashed one by one
constexpr size_t kTooLong = 64;  // in bytes; strings of at least this size are hashed immediately

// Prefetch distances from the current string: in codes, and in bytes of strings.
constexpr size_t kCodesAhead = 256;
constexpr size_t kBytesAhead = 1024;

// Hashes `count` strings of `size` < kTooLong bytes each. Does not read beyond the end of a string.
// An engine processes several strings per step, so the array must have kTogether elements; the
// elements after the first `count` may be copies of other elements.
using HashTogether = void (*)(const WaitingText* texts, int count, size_t size, uint64_t seed,
                              int64_t* codes);

// Selects the engine, for tests: "avx512", "avx2" or "portable". If the processor does not support
// this engine, selects the next simpler one. Returns the name of the selected engine, or null if
// `wanted` is not an engine.
const char* use_xxh64_engine(const char* wanted);
HashTogether xxh64_engine();

// Prefetches a cache line; `address` need not be valid.
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

// Hashes strings in batches: collects them by length and hashes kTogether strings of equal length
// at a time.
class TextHasher {
 public:
  TextHasher(uint64_t seed, int64_t* codes) : seed_(seed), codes_(codes) {
    for (size_t size = 0; size < kTooLong; ++size) end_[size] = waiting_[size];
  }

  // Sets codes[place] to the XXH64 of the string, in flush() at the latest. The string must stay in
  // memory until then.
  void add(const char* text, size_t size, int64_t place) {
    if (size >= kTooLong) {
      codes_[place] = static_cast<int64_t>(xxh64(text, size, seed_));
      return;
    }
    WaitingText* end = end_[size];
    *end++ = {text, place};
    // Test for a full array. This works because each row of waiting_ is aligned to its size.
    if (reinterpret_cast<uintptr_t>(end) % sizeof waiting_[0] == 0) {
      end -= kTogether;
      hash_together_(end, kTogether, size, seed_, codes_);
    }
    end_[size] = end;
  }

  // Hashes all strings that are still waiting.
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

// Sets codes[i] to the XXH64 of texts(i), a string_view, for all i in the ranges that ranges.next()
// yields.
template <class Texts, class Ranges>
void hash_texts(const Texts texts, Ranges& ranges, uint64_t seed, int64_t* codes) {
  TextHasher hasher(seed, codes);
  for (int64_t i = 0, end = 0; ranges.next(&i, &end);) {
    for (; i < end; ++i) {
      const auto text = texts(i);
      // Strings are mostly adjacent in memory but hashed out of order, so the hardware prefetcher
      // does not recognize the pattern. Prefetch explicitly.
      prefetch(text.data(), kBytesAhead);
      prefetch(codes + i, kCodesAhead * sizeof *codes);
      hasher.add(text.data(), text.size(), i);
    }
  }
  hasher.flush();
}

}  // namespace sparsekit
