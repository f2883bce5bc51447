// Finds the distinct keys of a batch and the first position of each key, with a scratch hash table.
// Both unique() and the insertion of new keys use it. There are four steps, each with its own
// launch:
//   enter  finds or claims a slot for every key; the slot keeps the smallest position and a count;
//   mark   sets the bit of the first position of every used slot;
//   scan   ranks keys in order of first occurrence, by a prefix sum over the bits;
//   emit   looks up the slot and the rank of every key; the caller provides this kernel.
// The choice of slots depends on the order of threads, but the result does not: slots are internal.
#pragma once

#include "cuda/primitives.h"
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

// Ranks the marked entries in ascending order. Stores a bit for each entry, and for each word of
// bits the number of marked entries before the word.
struct Ranks {
  uint32_t* bits;   // [words]
  int32_t* before;  // [words + 1]
  void* scan;
  int64_t words;

  Ranks(Arena& arena, int64_t n)
      : bits(arena.take<uint32_t>((n + 31) / 32)),
        before(arena.take<int32_t>((n + 31) / 32 + 1)),
        scan(arena.take<char>(scan_workspace_bytes((n + 31) / 32 + 1))),
        words((n + 31) / 32) {}

  // Marks the entries of a word for which `counts` is true. Each lane handles one entry. All lanes
  // of a warp must call this function with the same word.
  SPARSEKIT_DEVICE void mark(int64_t word, bool counts) const {
    const uint32_t mask = simt::warp_ballot(counts);
    if (simt::lane() != 0) return;
    if (word < words) bits[word] = mask;
    before[word] = simt::count_bits(mask);
  }
  void scan_marks(void* stream) const { exclusive_scan(before, before, words + 1, scan, stream); }

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

  FirstSeen(Arena& arena, int64_t n) : slots(arena.take<Slot>(num_slots(n) + 1)), ranks(arena, n) {}
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
