#include "sparsekit/bucketize.h"

#include <algorithm>

#include "cuda/primitives.h"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"

namespace sparsekit::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * simt::kWarp;

// Number of keys that each lane loads at once.
constexpr int kBatch = 4;

// Returns the number of keys per warp, a multiple of 32 * kBatch. The number grows with world_size,
// so that the table of counts has at most half as many entries as there are keys.
int keys_per_warp(int64_t world_size) {
  return 256 * std::max(1, static_cast<int>(world_size / 256));
}

struct Workspace {
  int64_t blocks;
  int32_t* starts;  // [world_size, blocks] key counts, later positions of the blocks' first keys
  char* scan;

  Workspace(Arena& arena, int64_t n, int64_t world_size) {
    const int64_t keys_per_block = kWarps * keys_per_warp(world_size);
    blocks = std::max<int64_t>(1, (n + keys_per_block - 1) / keys_per_block);
    starts = arena.take<int32_t>(world_size * blocks);
    scan = arena.take<char>(scan_workspace_bytes(world_size * blocks));
  }
};

struct Ranks {
  Owners owners;
  int64_t* bad;  // see bucketize.h

  // Returns `owner`. If it is not a valid rank, reports the key's shard and returns 0.
  SPARSEKIT_DEVICE int checked(int64_t key, int owner) const {
    if (owner >= 0 && owner < static_cast<int>(owners.world_size)) return owner;
    simt::atomic_min(bad, virtual_shard_of(key));
    return 0;
  }
};

// Calls visit(i, key, owner, peers) on all lanes for this warp's keys, in order. `owner` is -1 past
// the end. `peers` is the mask of the lanes whose keys have the same owner.
template <class Key, class Visit>
SPARSEKIT_DEVICE void for_keys_of_warp(const Key* keys, int64_t n, const Ranks& ranks,
                                       int keys_per_warp, const Visit& visit) {
  const int64_t begin = simt::global_thread() / simt::kWarp * keys_per_warp;
  const int64_t end = begin + keys_per_warp < n ? begin + keys_per_warp : n;
  for (int64_t batch = begin; batch < end; batch += kBatch * simt::kWarp) {
    const int64_t base = batch + simt::lane();
    Key key[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = base + j * simt::kWarp;
      key[j] = i < end ? keys[i] : Key{};
    }
    // Load all owners before checking any of them, so that these loads overlap, too.
    int from_map[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      from_map[j] = static_cast<int>(owner_of(key[j], ranks.owners));
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = base + j * simt::kWarp;
      const int owner = i < end ? ranks.checked(key[j], from_map[j]) : -1;
      visit(i, key[j], owner, simt::warp_match(owner));
    }
  }
}

// Fills counts [kWarps, world_size], in shared memory, with the number of keys of each owner in
// each warp of the block.
template <class Key>
SPARSEKIT_DEVICE void count_owners(const Key* keys, int64_t n, int world_size, const Ranks& ranks,
                                   int keys_per_warp, int32_t* counts) {
  for (int i = simt::thread(); i < kWarps * world_size; i += kThreads) counts[i] = 0;
  simt::barrier();
  int32_t* mine = counts + simt::thread() / simt::kWarp * world_size;
  for_keys_of_warp(keys, n, ranks, keys_per_warp, [=](int64_t, Key, int owner, uint32_t peers) {
    if (owner >= 0 && simt::lowest_bit(peers) == simt::lane()) {
      mine[owner] += simt::count_bits(peers);
    }
    simt::warp_sync();
  });
  simt::barrier();
}

template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    count_kernel(const Key* keys, DeviceCount n, int world_size, Ranks ranks, int keys_per_warp,
                 int32_t* starts) {
  int32_t* counts = simt::shared<int32_t>();
  count_owners(keys, n.get(), world_size, ranks, keys_per_warp, counts);
  for (int owner = simt::thread(); owner < world_size; owner += kThreads) {
    int32_t sum = 0;
    for (int warp = 0; warp < kWarps; ++warp) sum += counts[warp * world_size + owner];
    starts[owner * simt::blocks() + simt::block()] = sum;
  }
}

// Sorts keys by owner. Keys of one owner keep their order, since blocks, the warps of a block, the
// steps of a warp and its lanes all follow the order of the input.
template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    scatter_kernel(const Key* keys, DeviceCount n, int world_size, Ranks ranks, int keys_per_warp,
                   const int32_t* starts, Key* by_owner, int64_t* counts, int64_t* permutation) {
  int32_t* next = simt::shared<int32_t>();  // [warp, owner]: position of the warp's next key
  count_owners(keys, n.get(), world_size, ranks, keys_per_warp, next);
  for (int owner = simt::thread(); owner < world_size; owner += kThreads) {
    int32_t start = starts[owner * simt::blocks() + simt::block()];
    for (int warp = 0; warp < kWarps; ++warp) {
      const int32_t count = next[warp * world_size + owner];
      next[warp * world_size + owner] = start;
      start += count;
    }
    if (simt::block() == 0) {
      const int64_t end = owner + 1 < world_size ? starts[(owner + 1) * simt::blocks()] : n.get();
      counts[owner] = end - starts[owner * simt::blocks()];
    }
  }
  simt::barrier();

  int32_t* mine = next + simt::thread() / simt::kWarp * world_size;
  for_keys_of_warp(keys, n.get(), ranks, keys_per_warp,
                   [=](int64_t i, Key key, int owner, uint32_t peers) {
                     const uint32_t before = simt::lanes_before(peers, simt::lane());
                     const int32_t start = owner < 0 ? 0 : mine[owner];
                     simt::warp_sync();
                     if (owner >= 0) {
                       const int32_t position = start + simt::count_bits(before);
                       by_owner[position] = key;
                       permutation[position] = i;
                       if (before == 0) mine[owner] = start + simt::count_bits(peers);
                     }
                     simt::warp_sync();
                   });
}

}  // namespace

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size) {
  return Arena::bytes_of<Workspace>(n, world_size);
}

template <class Key>
void bucketize(const Key* keys, DeviceCount n, const Owners& owners, Key* by_owner, int64_t* counts,
               int64_t* permutation, int64_t* bad, void* workspace, void* stream) {
  const auto world_size = static_cast<int>(owners.world_size);
  Arena arena(workspace);
  const Workspace work(arena, n.most, world_size);
  const Ranks ranks{owners, bad};
  const int per_warp = keys_per_warp(world_size);
  const simt::Grid grid{work.blocks, kThreads,
                        kWarps * world_size * static_cast<int64_t>(sizeof(int32_t))};
  simt::launch("bucketize_count", count_kernel<Key>, grid, stream, keys, n, world_size, ranks,
               per_warp, work.starts);
  exclusive_scan(work.starts, work.starts, world_size * work.blocks, work.scan, stream);
  simt::launch("bucketize_scatter", scatter_kernel<Key>, grid, stream, keys, n, world_size, ranks,
               per_warp, work.starts, by_owner, counts, permutation);
}

template decltype(bucketize<int32_t>) bucketize<int32_t>;
template decltype(bucketize<int64_t>) bucketize<int64_t>;

}  // namespace sparsekit::cuda
