// Numbers the distinct keys of all tables of a call in the same launches. Entries are numbered
// across tables, and the entries of a table are contiguous. So one prefix sum over a bit per entry
// ranks the first occurrences in all tables: the rank within a table is the rank among all entries,
// minus the rank of the table's first entry.
#pragma once

#include "cuda/first_seen.cuh"
#include "cuda/group.cuh"
#include "cuda/hash_table.cuh"

namespace sparsekit::cuda {

// Returns the index of a table's first slot in the array of all slots. Each table of the call has a
// range of this array, with 5 slots per 3 entries. A slot is -1 while it is free. Otherwise it
// holds the smallest entry seen so far with the slot's key.
SPARSEKIT_HOST_DEVICE inline int64_t slots_before(int64_t entries, int64_t table) {
  return entries + entries * 2 / 3 + table;
}

// Sets slot_of[e] to the slot of entry e's key. One lane enters all equal keys of a warp, so that a
// frequent key costs at most one atomic per warp.
SPARSEKIT_KERNEL group_enter_kernel(DeviceGroup group, int64_t seed, int32_t* slots,
                                    uint32_t* slot_of) {
  const int32_t entries = group.entries();
  // All lanes of a warp iterate together, since they communicate; `first` is the entry of lane 0.
  for (int64_t first = simt::global_thread() - simt::lane(); first < entries;
       first += simt::global_threads()) {
    const auto e = static_cast<int32_t>(first + simt::lane());
    const bool there = first + simt::lane() < entries;
    const int f = there ? group.feature_of(e) : 0, t = there ? group.features[f].table : -1;
    const int64_t key = there ? group.key(f, e) : 0;
    // The lowest lane with a key has the key's first entry in this warp.
    const int leader = simt::lowest_bit(simt::warp_match(key) & simt::warp_match(t));
    uint32_t s = 0;
    if (there && leader == simt::lane()) {
      const auto begin = static_cast<uint32_t>(slots_before(group.first_entry(t), t));
      const auto end = static_cast<uint32_t>(slots_before(group.first_entry(t + 1), t + 1));
      const auto has_key = [&](int32_t other) {
        const bool same_feature = group.entry[f] <= other && other < group.entry[f + 1];
        return group.key(same_feature ? f : group.feature_of(other), other) == key;
      };
      s = begin + static_cast<uint32_t>(home_bucket(key, seed, end - begin));
      for (;;) {
        int32_t* slot = slots + s;
        int32_t seen = simt::load(slot);
        if (seen < 0) seen = simt::atomic_cas(slot, int32_t{-1}, e);
        if (seen < 0) break;
        if (has_key(seen)) {
          if (seen > e) simt::atomic_min(slot, e);
          break;
        }
        s = s + 1 == end ? begin : s + 1;
      }
    }
    s = simt::warp_shuffle(s, leader);
    if (there) slot_of[e] = s;
  }
}

// Marks and ranks the first entry of each key. Also clears `words`.
SPARSEKIT_KERNEL group_mark_kernel(DeviceGroup group, const int32_t* slots, const uint32_t* slot_of,
                                   Ranks first_seen, int64_t* words, int64_t num_words) {
  for (int64_t i = simt::global_thread(); i < num_words; i += simt::global_threads()) words[i] = 0;
  const int32_t entries = group.entries();
  const int64_t tile = first_seen.totals.take_tile();
  uint32_t marks = 0;
#pragma unroll
  for (int i = 0; i < kMarkSteps; ++i) {
    const int64_t e = Ranks::entry(tile, i);
    marks |= uint32_t{e < entries && slots[slot_of[e]] == e} << i;
  }
  first_seen.rank_tile(tile, marks);
}

// The first entry of each key, valid after find_first_entries().
struct FirstEntries {
  int32_t* slots;
  Ranks ranks;

  FirstEntries(Arena& arena, const GroupCall& call)
      : slots(arena.take<int32_t>(num_slots(call))),
        ranks(arena, call.entries, Ranks::look_back(arena, call.entries, kMarkWords)) {}

  static int64_t num_slots(const GroupCall& call) {
    return slots_before(call.entries, call.num_tables);
  }
  // Returns the first entry of the key in this slot.
  SPARSEKIT_DEVICE int32_t entry(int32_t slot) const { return slots[static_cast<uint32_t>(slot)]; }
  // Returns a key's index among the distinct keys of its table. `first` is the key's first entry,
  // and `begin` is the table's first entry.
  SPARSEKIT_DEVICE int32_t number(int32_t first, int32_t begin) const {
    return ranks.rank(first) - ranks.rank(begin);
  }
};

// Returns a grid for kernels that loop over entries, with one thread per entry.
inline simt::Grid grid_for_entries(const GroupCall& call) {
  return simt::strided_grid_for(call.entries, kGroupThreads);
}

// Writes the slot of each entry's key to slot_of [entries], and clears `words`.
inline void find_first_entries(const GroupCall& call, const DeviceGroup& group, int64_t seed,
                               const FirstEntries& first, int32_t* slot_of, int64_t* words,
                               int64_t num_words, void* stream) {
  const simt::Grid grid = grid_for_entries(call);
  // Clear the slots, and the words for prefix sums that follow them.
  const auto bytes =
      reinterpret_cast<char*>(first.ranks.totals.end()) - reinterpret_cast<char*>(first.slots);
  simt::fill_bytes(first.slots, 0xFF, bytes, stream);
  auto* slots = reinterpret_cast<uint32_t*>(slot_of);
  simt::launch("group: enter", group_enter_kernel, grid, stream, group, seed, first.slots, slots);
  simt::launch("group: mark", group_mark_kernel, first.ranks.grid(), stream, group, first.slots,
               slots, first.ranks, words, num_words);
}

}  // namespace sparsekit::cuda
