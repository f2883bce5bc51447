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
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads, kEnterBlocksAtOnce)
    enter_kernel(const Key* keys, DeviceCount n, int64_t seed, FirstSeen seen, uint32_t* slot_of) {
  const int64_t count = n.get();
  const int64_t capacity = num_slots(count);
  for (int64_t tile = simt::block(); tile * kEnterTile < count; tile += simt::blocks()) {
    enter_tile(
        seen, capacity, seed, tile, [=](int64_t i) { return i < count; },
        [=](int64_t i) { return int64_t{keys[i]}; },
        [=](int64_t i, uint32_t slot) { slot_of[i] = slot; });
  }
}

// Ranks the positions whose bits are set, with one thread per word of bits.
SPARSEKIT_KERNEL rank_kernel(Ranks ranks) {
  const int64_t tile = ranks.totals.take_tile();
  const int64_t word = tile * kSumThreads + simt::thread();
  const int32_t marked = word < ranks.words ? simt::count_bits(ranks.bits[word]) : 0;
  const int32_t before = ranks.totals.sum_before_in_launch(tile, marked);
  if (word <= ranks.words) ranks.before[word] = before;
}

// Number of keys per thread of emit_kernel; their loads overlap.
constexpr int kEmitSteps = 4;

template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads)
    emit_kernel(const Key* keys, DeviceCount n, FirstSeen seen, const uint32_t* slot_of,
                Key* unique_keys, int64_t* inverse, int64_t* counts, int64_t* num_unique) {
  if (simt::global_thread() == 0) *num_unique = seen.ranks.total();
  const int64_t count = n.get();
  const int64_t first = simt::block() * kEmitSteps * kSumThreads + simt::thread();
  const auto position = [=](int step) { return first + step * kSumThreads; };
  Slot slot[kEmitSteps];
#pragma unroll
  for (int j = 0; j < kEmitSteps; ++j) {
    slot[j] = position(j) < count ? seen.slots[slot_of[position(j)]] : Slot{};
  }
  Key key[kEmitSteps];
  int32_t rank[kEmitSteps];
#pragma unroll
  for (int j = 0; j < kEmitSteps; ++j) {
    const bool is_first = slot[j].first == position(j) && position(j) < count;
    key[j] = is_first ? keys[position(j)] : Key{};
    rank[j] = seen.ranks.rank(slot[j].first);
  }
#pragma unroll
  for (int j = 0; j < kEmitSteps; ++j) {
    if (position(j) >= count) break;
    inverse[position(j)] = rank[j];
    if (slot[j].first != position(j)) continue;
    unique_keys[rank[j]] = key[j];
    counts[rank[j]] = slot[j].count;
  }
}

struct Workspace {
  FirstSeen seen;
  uint32_t* slot_of;  // [n] the slot of each key

  Workspace(Arena& arena, int64_t n) : seen(arena, n), slot_of(arena.take<uint32_t>(n)) {}
};

}  // namespace

void clear_first_seen(const FirstSeen& seen, DeviceCount n, void* stream) {
  simt::launch("unique: clear", clear_kernel, simt::strided_grid_for(num_slots(n.most) + 1), stream,
               seen, n);
}

void rank_first_seen(const FirstSeen& seen, void* stream) {
  simt::launch("unique: rank", rank_kernel, seen.ranks.grid(), stream, seen.ranks);
}

int64_t unique_workspace_bytes(int64_t n) {
  return Arena::bytes_of<Workspace>(n);
}

template <class Key>
void unique(const Key* keys, DeviceCount n, int64_t seed, Key* unique_keys, int64_t* inverse,
            int64_t* counts, int64_t* num_unique, void* workspace, void* stream) {
  Arena arena(workspace);
  const Workspace work(arena, n.most);
  clear_first_seen(work.seen, n, stream);
  simt::launch("unique: enter", enter_kernel<Key>, enter_grid(n.most), stream, keys, n, seed,
               work.seen, work.slot_of);
  rank_first_seen(work.seen, stream);
  simt::launch("unique: emit", emit_kernel<Key>,
               simt::grid_for((n.most + kEmitSteps - 1) / kEmitSteps, kSumThreads), stream, keys, n,
               work.seen, work.slot_of, unique_keys, inverse, counts, num_unique);
}

template decltype(unique<int32_t>) unique<int32_t>;
template decltype(unique<int64_t>) unique<int64_t>;

}  // namespace sparsekit::cuda
