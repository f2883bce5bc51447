// Finds the distinct keys of a batch and the first position of each key, with a scratch hash table.
// Both unique() and the insertion of new keys use it. There are four steps, each with its own
// launch:
//   enter  finds or claims a slot for every key; the slot keeps the smallest position and a count;
//   mark   sets the bit of the first position of every used slot;
//   scan   ranks keys in order of first occurrence, by a prefix sum over the bits;
//   emit   looks up the slot and the rank of every key; the caller provides this kernel.
// The choice of slots depends on the order of threads, but the result does not: slots are internal.
#pragma once

#include "cuda/prefix_sum.cuh"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/device_count.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cuda {

// A slot is 16 bytes, loaded and stored in one access; two slots share a 32-byte sector.
struct alignas(16) Slot {
  int64_t key;
  int32_t first;
  int32_t count;
};

// Marks a free slot. A key with this value uses an extra slot after all others.
constexpr int64_t kNoKey = INT64_MIN;

// Returns the number of slots for n keys. If all keys are distinct, 3 of 5 slots are used.
SPARSEKIT_HOST_DEVICE inline int64_t num_slots(int64_t n) {
  return n + n * 2 / 3 + 1;
}

// Number of words of bits that each warp handles in a tile of rank_tile(). The host runner gets few
// words, so that small tests have several tiles.
#ifdef __CUDACC__
constexpr int kMarkSteps = 8;
#else
constexpr int kMarkSteps = 2;
#endif
constexpr int kMarkWords = kMarkSteps * kSumWarps;

// Ranks the marked entries in ascending order. Stores a bit for each entry, and for each word of
// bits the number of marked entries before the word. A launch ranks the entries with a block for
// each tile.
struct Ranks {
  uint32_t* bits;   // [words]
  int32_t* before;  // [words + 1]
  int64_t words;
  LookBack totals;  // of the launch that ranks the entries

  // Each tile of `totals` has words_of_tile words.
  static LookBack look_back(Arena& arena, int64_t n, int64_t words_of_tile) {
    return LookBack(arena, num_words(n) / words_of_tile + 1, 1);
  }
  Ranks(Arena& arena, int64_t n, const LookBack& totals)
      : bits(arena.take<uint32_t>(num_words(n))),
        before(arena.take<int32_t>(num_words(n) + 1)),
        words(num_words(n)),
        totals(totals) {}

  static int64_t num_words(int64_t n) { return (n + 31) / 32; }
  simt::Grid grid() const { return sum_grid(totals.tiles); }

  // Returns the entry that a thread handles in a step, of kMarkSteps steps, of a tile.
  SPARSEKIT_DEVICE static int64_t entry(int64_t tile, int step) {
    const int64_t warp = tile * kSumWarps + simt::thread() / simt::kWarp;
    return (warp * kMarkSteps + step) * simt::kWarp + simt::lane();
  }
  // Stores the bits and ranks of a tile of kMarkWords words. Bit i of `marks` is true if the
  // thread's entry in step i is marked. All threads of the block must call this function once.
  SPARSEKIT_DEVICE void rank_tile(int64_t tile, uint32_t marks) const {
    uint32_t own = 0;  // lane i has the word of step i
    for (int i = 0; i < kMarkSteps; ++i) {
      const uint32_t mask = simt::warp_ballot((marks >> i & 1) != 0);
      if (simt::lane() == i) own = mask;
    }
    const int64_t word = entry(tile, simt::lane()) / simt::kWarp;
    const int32_t sum = totals.sum_before_in_launch(tile, simt::count_bits(own));
    if (simt::lane() >= kMarkSteps || word > words) return;
    if (word < words) bits[word] = own;
    before[word] = sum;
  }

  // Returns the number of marked entries before e.
  SPARSEKIT_DEVICE int32_t rank(int32_t e) const {
    const int in_word = e % 32;
    const int32_t whole = before[e / 32];
    return in_word == 0 ? whole
                        : whole + simt::count_bits(simt::lanes_before(bits[e / 32], in_word));
  }
  SPARSEKIT_DEVICE int32_t total() const { return before[words]; }
};

struct FirstSeen {
  Slot* slots;  // [num_slots(n) + 1]
  Ranks ranks;  // ranks of the positions at which a key occurs first

  FirstSeen(Arena& arena, int64_t n)
      : slots(arena.take<Slot>(num_slots(n) + 1)),
        ranks(arena, n, Ranks::look_back(arena, n, kSumThreads)) {}
};

// Returns the slot of `key` among `capacity` slots, and claims a slot if the key is new.
SPARSEKIT_DEVICE int64_t enter_key(Slot* slots, int64_t capacity, int64_t seed, int64_t key) {
  if (key == kNoKey) return capacity;
  for (int64_t s = home_bucket(key, seed, capacity);;) {
    int64_t seen = simt::load(&slots[s].key);
    if (seen == kNoKey) seen = simt::atomic_cas(&slots[s].key, kNoKey, key);
    if (seen == key || seen == kNoKey) return s;
    s = s + 1 == capacity ? 0 : s + 1;
  }
}

// Counts one more key, at `position`, in `slot`. All lanes of the warp must call this function,
// with positions that ascend with the lane; lanes without a key pass slot < 0. One lane counts all
// equal slots of the warp, so that a frequent key costs one atomic per warp.
SPARSEKIT_DEVICE void count_key(Slot* slots, int64_t slot, int32_t position) {
  const uint32_t same = simt::warp_match(slot);
  if (slot < 0 || simt::lowest_bit(same) != simt::lane()) return;
  if (simt::load(&slots[slot].first) > position) simt::atomic_min(&slots[slot].first, position);
  simt::atomic_add(&slots[slot].count, simt::count_bits(same));
}

// Clears the slots and bits that n keys need. This function and rank_first_seen are defined in
// unique.cu.
void clear_first_seen(const FirstSeen& seen, DeviceCount n, void* stream);
// Launches the kernels of the steps `mark` and `scan`.
void rank_first_seen(const FirstSeen& seen, DeviceCount n, void* stream);

}  // namespace sparsekit::cuda
