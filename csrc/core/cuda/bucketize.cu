#include "sparsekit/bucketize.h"

#include <algorithm>

#include "cuda/prefix_sum.cuh"
#include "cuda/primitives.h"

namespace sparsekit::cuda {
namespace {

// Number of keys per tile that each thread handles. The host runner uses fewer, so that small tests
// have several tiles.
#ifdef __CUDACC__
constexpr int kSteps = 8;
#else
constexpr int kSteps = 2;
#endif
constexpr int kTile = kSteps * kSumThreads;

// Number of scatter_kernel blocks that a multiprocessor runs at a time; ptxas limits registers to
// match.
constexpr int kBlocksAtOnce = 4;

struct Workspace {
  int64_t tiles;
  int32_t* starts;  // [world_size, tiles] key counts, later positions of the tiles' first keys
  char* scan;

  Workspace(Arena& arena, int64_t n, int64_t world_size) {
    tiles = std::max<int64_t>(1, (n + kTile - 1) / kTile);
    starts = arena.take<int32_t>(world_size * tiles);
    scan = arena.take<char>(scan_workspace_bytes(world_size * tiles));
  }
};

// A thread's keys in a tile, and their owners. A tile's keys are ordered by warp, then step, then
// lane.
template <class Key>
struct Keys {
  Key key[kSteps];
  int owner[kSteps];  // world_size for steps beyond the last key

  // Returns the position in the tile that the thread handles in a step.
  SPARSEKIT_DEVICE static int place(int step) {
    return (simt::thread() / simt::kWarp * kSteps + step) * simt::kWarp + simt::lane();
  }

  // If a key's owner is not a valid rank, reports the key's shard in *bad (see bucketize.h), and
  // assigns the key to rank 0.
  SPARSEKIT_DEVICE Keys(const Key* keys, int64_t n, const Owners& owners, int64_t* bad) {
    const auto world_size = static_cast<int>(owners.world_size);
    const int64_t first = simt::block() * kTile;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      key[i] = first + place(i) < n ? keys[first + place(i)] : Key{};
    }
    // Load all owners before checking any of them, so that these loads overlap, too.
#pragma unroll
    for (int i = 0; i < kSteps; ++i) owner[i] = static_cast<int>(owner_of(key[i], owners));
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (first + place(i) >= n) {
        owner[i] = world_size;
      } else if (owner[i] < 0 || owner[i] >= world_size) {
        simt::atomic_min(bad, virtual_shard_of(key[i]));
        owner[i] = 0;
      }
    }
  }
};

template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads)
    count_kernel(const Key* keys, DeviceCount n, Owners owners, int64_t* bad, int32_t* starts) {
  const auto world_size = static_cast<int>(owners.world_size);
  auto* counts = simt::shared<int32_t>();  // [world_size]
  for (int owner = simt::thread(); owner < world_size; owner += kSumThreads) counts[owner] = 0;
  simt::barrier();
  const Keys<Key> mine(keys, n.get(), owners, bad);
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (mine.owner[i] < world_size) simt::atomic_add(&counts[mine.owner[i]], int32_t{1});
  }
  simt::barrier();
  for (int owner = simt::thread(); owner < world_size; owner += kSumThreads) {
    starts[owner * simt::blocks() + simt::block()] = counts[owner];
  }
}

// Shared memory of scatter_kernel: the part for prefix sums, then these arrays.
template <class Key>
struct ScatterBlock {
  // The origin of a key in the sorted tile.
  struct Source {
    uint16_t owner;
    uint16_t place;  // in the tile
  };

  int32_t* to;  // [world_size] distance from a key's place in the sorted tile to its output place
  uint16_t* begins;  // [kSumWarps, world_size] place in the sorted tile of a warp's next key
  // The sorted tile, which reuses the memory of `begins`.
  Key* keys;        // [kTile]
  Source* sources;  // [kTile]

  // The length of `to` is even, so that `keys` is aligned.
  SPARSEKIT_DEVICE ScatterBlock(int world_size)
      : to(reinterpret_cast<int32_t*>(simt::shared<SumBlock>() + 1)),
        begins(reinterpret_cast<uint16_t*>(to + (world_size + 1) / 2 * 2)),
        keys(reinterpret_cast<Key*>(begins)),
        sources(reinterpret_cast<Source*>(keys + kTile)) {}

  static int64_t bytes(int64_t world_size) {
    const int64_t of_begins = kSumWarps * world_size * sizeof(uint16_t);
    const int64_t of_tile = kTile * (sizeof(Key) + sizeof(Source));
    return sizeof(SumBlock) + (world_size + 1) / 2 * 2 * sizeof(int32_t) +
           std::max(of_begins, of_tile);
  }
};

// Sorts keys by owner. Keys of one owner keep their order, since tiles, the warps of a tile, the
// steps of a warp and its lanes all follow the order of the input. A tile is first sorted in shared
// memory, so that neighbouring threads write neighbouring words.
template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads, kBlocksAtOnce)
    scatter_kernel(const Key* keys, DeviceCount n, Owners owners, int owner_bits, int64_t* bad,
                   const int32_t* starts, Key* by_owner, int64_t* counts, int64_t* permutation) {
  const auto world_size = static_cast<int>(owners.world_size);
  const ScatterBlock<Key> block(world_size);
  const auto warp_begins = [=](int warp) { return block.begins + warp * world_size; };

  // Count each warp's keys for each owner. A key's rank is the number of keys with the same owner
  // before it in its warp.
  uint16_t* own = warp_begins(simt::thread() / simt::kWarp);
  for (int owner = simt::lane(); owner < world_size; owner += simt::kWarp) own[owner] = 0;
  simt::warp_sync();
  const int64_t num_keys = n.get();
  const Keys<Key> mine(keys, num_keys, owners, bad);
  int rank[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int owner = mine.owner[i];
    const bool there = owner < world_size;
    const uint32_t peers = simt::warp_match_bits(static_cast<uint32_t>(owner), owner_bits);
    const uint32_t before = simt::lanes_before(peers, simt::lane());
    const int counted = there ? own[owner] : 0;
    rank[i] = counted + simt::count_bits(before);
    simt::warp_sync();
    if (there && before == 0) own[owner] = static_cast<uint16_t>(counted + simt::count_bits(peers));
    simt::warp_sync();
  }
  simt::barrier();

  // Find where the keys of this thread's owners begin, in the sorted tile and in the output.
  const int owners_each = (world_size + kSumThreads - 1) / kSumThreads;
  const int first_owner = simt::thread() * owners_each;
  const int end_owner =
      first_owner + owners_each < world_size ? first_owner + owners_each : world_size;
  int32_t of_thread = 0;
  for (int owner = first_owner; owner < end_owner; ++owner) {
    for (int warp = 0; warp < kSumWarps; ++warp) of_thread += warp_begins(warp)[owner];
  }
  auto begin = static_cast<int32_t>(sum_before(of_thread));
  for (int owner = first_owner; owner < end_owner; ++owner) {
    const int32_t start = starts[owner * simt::blocks() + simt::block()];
    block.to[owner] = start - begin;
    for (int warp = 0; warp < kSumWarps; ++warp) {
      const uint16_t count = warp_begins(warp)[owner];
      warp_begins(warp)[owner] = static_cast<uint16_t>(begin);
      begin += count;
    }
    if (simt::block() == 0) {
      const int64_t end = owner + 1 < world_size ? starts[(owner + 1) * simt::blocks()] : num_keys;
      counts[owner] = end - start;
    }
  }
  simt::barrier();

#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (mine.owner[i] < world_size) rank[i] += own[mine.owner[i]];
  }
  simt::barrier();  // the sorted tile overwrites `begins`
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (mine.owner[i] == world_size) continue;
    block.keys[rank[i]] = mine.key[i];
    block.sources[rank[i]] = {static_cast<uint16_t>(mine.owner[i]),
                              static_cast<uint16_t>(Keys<Key>::place(i))};
  }
  simt::barrier();
  const int64_t first = simt::block() * kTile;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int at = i * kSumThreads + simt::thread();
    if (first + at >= num_keys) break;
    const auto source = block.sources[at];
    const int32_t position = at + block.to[source.owner];
    by_owner[position] = block.keys[at];
    permutation[position] = first + source.place;
  }
}

}  // namespace

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size) {
  return Arena::bytes_of<Workspace>(n, world_size);
}

template <class Key>
void bucketize(const Key* keys, DeviceCount n, const Owners& owners, Key* by_owner, int64_t* counts,
               int64_t* permutation, int64_t* bad, void* workspace, void* stream) {
  const auto world_size = static_cast<int64_t>(owners.world_size);
  Arena arena(workspace);
  const Workspace work(arena, n.most, world_size);
  const auto grid = [&](int64_t shared) { return simt::Grid{work.tiles, kSumThreads, shared}; };
  int owner_bits = 0;  // bits in a number up to world_size
  while (world_size >> owner_bits != 0) ++owner_bits;
  simt::launch("bucketize_count", count_kernel<Key>, grid(world_size * sizeof(int32_t)), stream,
               keys, n, owners, bad, work.starts);
  exclusive_scan(work.starts, work.starts, world_size * work.tiles, work.scan, stream);
  simt::launch("bucketize_scatter", scatter_kernel<Key>, grid(ScatterBlock<Key>::bytes(world_size)),
               stream, keys, n, owners, owner_bits, bad, work.starts, by_owner, counts,
               permutation);
}

template decltype(bucketize<int32_t>) bucketize<int32_t>;
template decltype(bucketize<int64_t>) bucketize<int64_t>;

}  // namespace sparsekit::cuda
