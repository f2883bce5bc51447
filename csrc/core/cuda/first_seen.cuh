// Distinct keys of a batch, each with the position where it came first: a scratch hash table that
// unique() and the insertion of new keys share. In four steps, each a launch:
//   enter  every key finds or claims its slot, which keeps the smallest position and a count;
//   mark   every used slot sets the bit of its first position;
//   scan   of the bits gives each first position its rank, so order is that of first occurrence;
//   emit   (the caller's kernel) looks up slot and rank of every key.
// Nothing depends on which thread came first except the place of a slot, which nobody sees.
#pragma once

#include "cuda/primitives.h"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/device_count.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cuda {

// 16 bytes that move in one access; two share a 32-byte sector.
struct alignas(16) Slot {
  int64_t key;
  int32_t first;
  int32_t count;
};

// Marks a free slot. The key of this value has a slot of its own behind the others.
constexpr int64_t kNoKey = INT64_MIN;

// Slots for n keys: 3 of 5 used when all are distinct.
SPARSEKIT_HOST_DEVICE inline int64_t num_slots(int64_t n) {
  return n + n * 2 / 3 + 1;
}

struct FirstSeen {
  Slot* slots;      // [num_slots(n) + 1]
  uint32_t* bits;   // [words] bit i: the key at position i comes there first
  int32_t* before;  // [words + 1] number of bits in earlier words; the last is the total
  void* scan;
  int64_t words;

  FirstSeen(Arena& arena, int64_t n)
      : slots(arena.take<Slot>(num_slots(n) + 1)),
        bits(arena.take<uint32_t>((n + 31) / 32)),
        before(arena.take<int32_t>((n + 31) / 32 + 1)),
        scan(arena.take<char>(scan_workspace_bytes((n + 31) / 32 + 1))),
        words((n + 31) / 32) {}

  SPARSEKIT_DEVICE int64_t rank(int32_t first) const {
    const uint32_t word = bits[first / 32];
    return before[first / 32] + simt::count_bits(simt::lanes_before(word, first % 32));
  }
  SPARSEKIT_DEVICE int64_t total() const { return before[words]; }
};

// The slot of `key` among `capacity` ones, claimed if it is new.
SPARSEKIT_DEVICE int64_t enter_key(Slot* slots, int64_t capacity, int64_t seed, int64_t key) {
  if (key == kNoKey) return capacity;
  for (int64_t s = home_bucket(key, seed, capacity);;) {
    int64_t seen = simt::load(&slots[s].key);
    if (seen == kNoKey) seen = simt::atomic_cas(&slots[s].key, kNoKey, key);
    if (seen == key || seen == kNoKey) return s;
    s = s + 1 == capacity ? 0 : s + 1;
  }
}

// For a full warp: counts one more key in `slot`, at `position`, which rises with the lane. Lanes
// with slot < 0 have none. Equal slots are counted by one lane, so that a hot key costs one atomic
// per warp.
SPARSEKIT_DEVICE void count_key(Slot* slots, int64_t slot, int32_t position) {
  const uint32_t same = simt::warp_match(slot);
  if (slot < 0 || simt::lowest_bit(same) != simt::lane()) return;
  if (simt::load(&slots[slot].first) > position) simt::atomic_min(&slots[slot].first, position);
  simt::atomic_add(&slots[slot].count, simt::count_bits(same));
}

// Empties the slots and bits that n keys need. Declared here, defined in unique.cu.
void clear_first_seen(const FirstSeen& seen, DeviceCount n, void* stream);
// mark and scan.
void rank_first_seen(const FirstSeen& seen, DeviceCount n, void* stream);

}  // namespace sparsekit::cuda
