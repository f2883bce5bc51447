// A stable radix sort of pairs, by 8 bits of the key at a time. Each launch sorts by one digit: a
// block ranks the pairs in its tile and finds by look-back where its pairs with each digit go. The
// kernel that writes the keys also counts their digits, so no other launches are needed.
#pragma once

#include "cuda/prefix_sum.cuh"

namespace sparsekit::cuda {

constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
static_assert(kDigits == kSumThreads, "a block has a thread for each digit");
constexpr int kMostDigits = 32 / kDigitBits;  // digits in a key

// Number of pairs per tile that each thread handles. The host runner uses fewer, so that small
// tests have several tiles.
#ifdef __CUDACC__
constexpr int kSortSteps = 16;
#else
constexpr int kSortSteps = 2;
#endif
constexpr int kSortTile = kSortSteps * kSumThreads;

// The pairs before or after a pass.
struct Pairs {
  uint32_t* keys;
  int32_t* values;
};

struct RadixSort {
  int32_t* counts;  // [kMostDigits, kDigits] number of keys with each digit; must be zeroed
  LookBack totals;  // totals for each digit, in the first pass

  RadixSort(Arena& arena, int64_t n)
      : counts(arena.take<int32_t>(kMostDigits * kDigits)),
        totals(arena, (n + kSortTile - 1) / kSortTile, kDigits) {}

  // Zeroes `counts`, with any number of threads.
  SPARSEKIT_DEVICE void zero_counts() const {
    for (int64_t i = simt::global_thread(); i < kMostDigits * kDigits; i += simt::global_threads())
      counts[i] = 0;
  }
};

SPARSEKIT_DEVICE int digit_of(uint32_t key, int digit) {
  return static_cast<int>(key >> (digit * kDigitBits) & (kDigits - 1));
}

// Counts digits of keys in shared memory, [num_digits, kDigits], then adds the counts to
// sort.counts. All threads of the block must call begin() and end().
struct DigitCounts {
  RadixSort sort;
  int num_digits;

  simt::Grid grid(int64_t blocks) const {
    return {blocks, kSumThreads, num_digits * kDigits * static_cast<int64_t>(sizeof(int32_t))};
  }

  SPARSEKIT_DEVICE void begin() const {
    auto* in_block = simt::shared<int32_t>();
    for (int d = 0; d < num_digits; ++d) in_block[d * kDigits + simt::thread()] = 0;
    simt::barrier();
  }
  SPARSEKIT_DEVICE void add(uint32_t key) const {
    auto* in_block = simt::shared<int32_t>();
    for (int d = 0; d < num_digits; ++d) {
      simt::atomic_add(&in_block[d * kDigits + digit_of(key, d)], int32_t{1});
    }
  }
  SPARSEKIT_DEVICE void end() const {
    simt::barrier();
    for (int d = 0; d < num_digits; ++d) {
      const int at = d * kDigits + simt::thread();
      const int32_t count = simt::shared<int32_t>()[at];
      if (count > 0) simt::atomic_add(&sort.counts[at], count);
    }
  }
};

// Returns the number of digits in a key with `bits` bits.
inline int digits_of(int bits) {
  return (bits + kDigitBits - 1) / kDigitBits;
}

// Returns where the pairs must be before a call to sort_by_digits(..., spare, to, ...).
inline Pairs unsorted_pairs(int num_digits, Pairs spare, Pairs to) {
  return num_digits % 2 == 0 ? to : spare;
}

// Sorts n pairs by the low num_digits digits of the key, and leaves them in `to`. The pairs are
// moved between `to` and `spare`. sort.counts must hold the counts of their digits, and sort.totals
// must be cleared.
void sort_by_digits(const RadixSort& sort, int num_digits, int64_t n, Pairs spare, Pairs to,
                    void* stream);

}  // namespace sparsekit::cuda
