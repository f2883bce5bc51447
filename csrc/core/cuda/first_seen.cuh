// Finds the distinct keys of a batch and the first position of each key, with a scratch hash table.
// Both unique() and the insertion of new keys use it. There are three steps, each with its own
// launch:
//   enter  finds or claims a slot for every key; the slot keeps the smallest position and a count,
//          and that position's bit is set;
//   rank   ranks keys in order of first occurrence, with a prefix sum over the bits;
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

// Number of bit words that each warp handles in a tile of rank_tile(). The host runner uses fewer
// words, so that small tests have several tiles.
#ifdef __CUDACC__
constexpr int kMarkSteps = 8;
#else
constexpr int kMarkSteps = 2;
#endif
constexpr int kMarkWords = kMarkSteps * kSumWarps;

// Ranks the marked entries in ascending order. Stores a bit per entry and, for each word of bits,
// the number of marked entries before it. One launch ranks all entries, with one block per tile.
struct Ranks {
  uint32_t* bits;   // [words]
  int32_t* before;  // [words + 1]
  int64_t words;
  LookBack totals;  // totals for the launch that ranks the entries

  // Each tile of `totals` covers words_of_tile words of bits.
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

  // Returns the entry that a thread handles in a given tile and step < kMarkSteps.
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

  SPARSEKIT_DEVICE bool is_marked(int64_t e) const { return (bits[e / 32] >> e % 32 & 1) != 0; }
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
  Ranks ranks;  // ranks of the positions of first occurrences

  FirstSeen(Arena& arena, int64_t n)
      : slots(arena.take<Slot>(num_slots(n) + 1)),
        ranks(arena, n, Ranks::look_back(arena, n, kSumThreads)) {}

  // Returns the slot as a pair of words that other threads may change. The second word holds
  // `first` and `count`.
  SPARSEKIT_DEVICE simt::Pair* pair(uint32_t slot) const {
    return reinterpret_cast<simt::Pair*>(slots + slot);
  }
};
SPARSEKIT_DEVICE int64_t first_and_count(int32_t first, uint32_t count) {
  return static_cast<int64_t>(uint64_t{count} << 32 | static_cast<uint32_t>(first));
}

// Number of keys per tile that each thread enters concurrently.
constexpr int kEnterSteps = 4;
constexpr int kEnterTile = kEnterSteps * kSumThreads;

// Number of key-entering blocks that a multiprocessor runs at a time; ptxas limits registers to
// match.
constexpr int kEnterBlocksAtOnce = 4;

// Shared memory of a block that enters keys.
struct EnterBlock {
  static constexpr int kPlaces = 2 * kEnterTile;  // a power of two

  int64_t keys[kEnterTile];
  int32_t first[kPlaces];      // a hash table: the tile's first key that equals a key, or -1
  uint32_t words[kEnterTile];  // for the first of equal keys: their count, later their slot
};

// Returns a grid for kernels that call enter_tile() for each tile of the n keys.
inline simt::Grid enter_grid(int64_t n) {
  simt::Grid grid = simt::strided_grid_for((n + kEnterSteps - 1) / kEnterSteps, kSumThreads);
  grid.shared_bytes = sizeof(EnterBlock);
  return grid;
}

// Adds `count` equal keys, the first of them at `position`, to the slot that has this key. `first`
// is an earlier or current value of the slot's `first`. Returns true if the key has not been seen
// before `position`.
//
// The bit of a position is flipped once when the position becomes its key's first and once more
// when a smaller position replaces it; the two flips may happen in either order. The caller flips
// the bit of `position`.
SPARSEKIT_DEVICE bool count_keys(const FirstSeen& seen, uint32_t slot, int32_t first,
                                 int32_t position, int32_t count) {
  simt::atomic_add(&seen.slots[slot].count, count);
  if (first <= position) return false;
  first = simt::atomic_min(&seen.slots[slot].first, position);
  if (first <= position) return false;
  if (first != INT32_MAX) simt::atomic_xor(&seen.ranks.bits[first / 32], 1u << first % 32);
  return true;
}

// Enters the keys at the positions of a tile. All threads of the block must call this function.
// wants(i) returns true if position i has a key to enter, key_at(i) returns this key, and put(i,
// slot) receives its slot.
//
// Equal keys in a tile are entered as one, so that a frequent key costs few atomics: the device
// executes atomics on the same address one at a time.
template <class Wants, class KeyAt, class Put>
SPARSEKIT_DEVICE void enter_tile(const FirstSeen& seen, int64_t capacity, int64_t seed,
                                 int64_t tile, const Wants& wants, const KeyAt& key_at,
                                 const Put& put) {
  auto& block = *simt::shared<EnterBlock>();
  const int64_t begin = tile * kEnterTile;
  const auto place = [](int step) { return step * kSumThreads + simt::thread(); };
  for (int i = simt::thread(); i < EnterBlock::kPlaces; i += kSumThreads) block.first[i] = -1;
  int64_t key[kEnterSteps];
  bool wanted[kEnterSteps];
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    wanted[j] = wants(begin + place(j));
    key[j] = wanted[j] ? key_at(begin + place(j)) : 0;
    block.keys[place(j)] = key[j];
    block.words[place(j)] = 0;
  }
  simt::barrier();

  // Find each key's place in `first`, and its home slot.
  uint32_t slot[kEnterSteps];
  int leader[kEnterSteps];
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    const uint64_t hash = hash_key(key[j] ^ seed);
    slot[j] = static_cast<uint32_t>(key[j] == kNoKey ? capacity : bucket_of_hash(hash, capacity));
    leader[j] = static_cast<int>(hash % EnterBlock::kPlaces);
    while (wanted[j]) {
      const int32_t other = simt::atomic_cas(&block.first[leader[j]], int32_t{-1}, place(j));
      if (other < 0) break;
      if (block.keys[other] == key[j]) {
        if (other > place(j)) simt::atomic_min(&block.first[leader[j]], place(j));
        break;
      }
      leader[j] = (leader[j] + 1) % EnterBlock::kPlaces;
    }
  }
  simt::barrier();
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    leader[j] = block.first[leader[j]];
    if (wanted[j]) simt::atomic_add(&block.words[leader[j]], uint32_t{1});
  }
  simt::barrier();

  // Enter only the first of equal keys. In each round, a thread examines one slot for each of its
  // keys.
  const auto position = [=](int step) { return static_cast<int32_t>(begin) + place(step); };
  const simt::Pair free_slot{{kNoKey, first_and_count(INT32_MAX, 0)}};
  simt::Pair found[kEnterSteps];
  bool pending[kEnterSteps], marked[kEnterSteps], any = false;
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    pending[j] = wanted[j] && leader[j] == place(j);
    marked[j] = false;
    any = any || pending[j];
    found[j] = pending[j] ? simt::load(seen.pair(slot[j])) : free_slot;
  }
  while (any) {
    any = false;
#pragma unroll
    for (int j = 0; j < kEnterSteps; ++j) {
      if (!pending[j]) continue;
      const int64_t own_key = block.keys[place(j)];
      const uint32_t own_count = block.words[place(j)];
      if (found[j].at[0] == kNoKey && own_key != kNoKey) {
        found[j] = simt::claim(seen.pair(slot[j]), free_slot,
                               {{own_key, first_and_count(position(j), own_count)}});
        marked[j] = found[j].at[0] == kNoKey;
      }
      if (found[j].at[0] == own_key) {
        marked[j] = count_keys(seen, slot[j], static_cast<int32_t>(found[j].at[1]), position(j),
                               static_cast<int32_t>(own_count));
      }
      pending[j] = found[j].at[0] != own_key && !marked[j];
      if (pending[j]) {
        slot[j] = slot[j] + 1 == capacity ? 0 : slot[j] + 1;
        found[j] = simt::load(seen.pair(slot[j]));
        any = true;
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    const uint32_t marks = simt::warp_ballot(marked[j]);
    if (simt::lane() == 0 && marks != 0)
      simt::atomic_xor(&seen.ranks.bits[position(j) / 32], marks);
    if (wanted[j] && leader[j] == place(j)) block.words[place(j)] = slot[j];
  }
  simt::barrier();
#pragma unroll
  for (int j = 0; j < kEnterSteps; ++j) {
    if (wanted[j]) put(begin + place(j), block.words[leader[j]]);
  }
  simt::barrier();  // the next tile uses the same memory
}

// Clears the slots and bits that n keys need. This function and rank_first_seen are defined in
// unique.cu.
void clear_first_seen(const FirstSeen& seen, DeviceCount n, void* stream);
// Launches the kernel for the step `rank`.
void rank_first_seen(const FirstSeen& seen, void* stream);

}  // namespace sparsekit::cuda
