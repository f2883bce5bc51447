#include "sparsekit/unique.h"

#include "cuda/first_seen.cuh"

namespace sparsekit::cuda {
namespace {

SPARSEKIT_KERNEL clear_kernel(FirstSeen seen, DeviceCount n) {
  const int64_t count = n.get();
  for (int64_t i = simt::global_thread(); i < num_slots(count) + 1; i += simt::global_threads()) {
    // Store Slot{kNoKey, INT32_MAX, 0} in one access.
    reinterpret_cast<simt::Vec<int64_t, 2>*>(seen.slots)[i] = {{kNoKey, INT32_MAX}};
  }
  for (int64_t i = simt::global_thread(); i < seen.ranks.words; i += simt::global_threads()) {
    seen.ranks.bits[i] = 0;
  }
  seen.ranks.totals.clear();
}

template <class Key>
SPARSEKIT_KERNEL enter_kernel(const Key* keys, DeviceCount n, int64_t seed, FirstSeen seen,
                              int64_t* slot_of) {
  const int64_t count = n.get();
  const int64_t capacity = num_slots(count);
  // All lanes of a warp iterate together, since they communicate; `first` is lane 0's position.
  for (int64_t first = simt::global_thread() - simt::lane(); first < count;
       first += simt::global_threads()) {
    const int64_t i = first + simt::lane();
    const int64_t slot = i < count ? enter_key(seen.slots, capacity, seed, keys[i]) : -1;
    if (slot >= 0) slot_of[i] = slot;
    count_key(seen.slots, slot, static_cast<int32_t>(i));
  }
}

SPARSEKIT_KERNEL mark_kernel(FirstSeen seen, DeviceCount n) {
  const int64_t end = num_slots(n.get()) + 1;
  for (int64_t i = simt::global_thread(); i < end; i += simt::global_threads()) {
    const Slot slot = seen.slots[i];
    if (slot.count > 0) simt::atomic_or(&seen.ranks.bits[slot.first / 32], 1u << (slot.first % 32));
  }
}

// Ranks the positions whose bits are set, with one thread for each word of bits.
SPARSEKIT_KERNEL rank_kernel(Ranks ranks) {
  const int64_t tile = ranks.totals.take_tile();
  const int64_t word = tile * kSumThreads + simt::thread();
  const int32_t marked = word < ranks.words ? simt::count_bits(ranks.bits[word]) : 0;
  const int32_t before = ranks.totals.sum_before_in_launch(tile, marked);
  if (word <= ranks.words) ranks.before[word] = before;
}

template <class Key>
SPARSEKIT_KERNEL emit_kernel(const Key* keys, DeviceCount n, FirstSeen seen, Key* unique_keys,
                             int64_t* inverse, int64_t* counts, int64_t* num_unique) {
  const int64_t i = simt::global_thread();
  if (i == 0) *num_unique = seen.ranks.total();
  if (i >= n.get()) return;
  const Slot slot = seen.slots[inverse[i]];
  const int64_t rank = seen.ranks.rank(slot.first);
  inverse[i] = rank;
  if (slot.first == i) {
    unique_keys[rank] = keys[i];
    counts[rank] = slot.count;
  }
}

}  // namespace

void clear_first_seen(const FirstSeen& seen, DeviceCount n, void* stream) {
  simt::launch("unique: clear", clear_kernel, simt::strided_grid_for(num_slots(n.most) + 1), stream,
               seen, n);
}

void rank_first_seen(const FirstSeen& seen, DeviceCount n, void* stream) {
  simt::launch("unique: mark", mark_kernel, simt::strided_grid_for(num_slots(n.most) + 1), stream,
               seen, n);
  simt::launch("unique: rank", rank_kernel, seen.ranks.grid(), stream, seen.ranks);
}

int64_t unique_workspace_bytes(int64_t n) {
  return Arena::bytes_of<FirstSeen>(n);
}

template <class Key>
void unique(const Key* keys, DeviceCount n, int64_t seed, Key* unique_keys, int64_t* inverse,
            int64_t* counts, int64_t* num_unique, void* workspace, void* stream) {
  Arena arena(workspace);
  const FirstSeen seen(arena, n.most);
  clear_first_seen(seen, n, stream);
  // `inverse` holds the slots until emit_kernel replaces them with ranks.
  simt::launch("unique: enter", enter_kernel<Key>, simt::strided_grid_for(n.most), stream, keys, n,
               seed, seen, inverse);
  rank_first_seen(seen, n, stream);
  simt::launch("unique: emit", emit_kernel<Key>, simt::grid_for(n.most), stream, keys, n, seen,
               unique_keys, inverse, counts, num_unique);
}

template decltype(unique<int32_t>) unique<int32_t>;
template decltype(unique<int64_t>) unique<int64_t>;

}  // namespace sparsekit::cuda
