#include "sparsekit/bucketize.h"

#include <algorithm>
#include <utility>

#include "cpu/first_bad.h"

namespace sparsekit::cpu {
namespace {

// Like sparsekit::owner_of, but kMapped tells at compile time whether there is a map, so that loops
// need not test for one.
template <bool kMapped>
int64_t owner_of(int64_t key, const Owners& owners) {
  if constexpr (kMapped) return owners.map[virtual_shard_of(key)];
  return owner_by_modulo(key, owners);
}

// Number of keys per chunk. One thread counts the keys in a chunk and later moves them. The chunk
// size is fixed, so a chunk's counts do not depend on the number of threads.
constexpr int64_t kChunk = 16384;

int64_t num_chunks(int64_t n) {
  return (n + kChunk - 1) / kChunk;
}

// Sorts the keys by owner with a counting sort, in two passes over the keys. `next` [chunks,
// world_size] first holds the number of keys that each owner has in a chunk. Later it holds the
// output position of the chunk's next key for that owner.
template <bool kMapped, class Key>
int64_t sort_by_owner(const Key* keys, int64_t n, const Owners& owners, Key* by_owner,
                      int64_t* counts, int64_t* permutation, int64_t* next,
                      const ParallelFor& parallel_for) {
  const int64_t chunks = num_chunks(n);
  const auto world_size = static_cast<int64_t>(owners.world_size);
  FirstBad bad;
  parallel_for.each(chunks, [=, owners = owners, &bad](int64_t chunk) {
    int64_t* count = next + chunk * world_size;
    std::fill(count, count + world_size, int64_t{0});
    const int64_t stop = std::min(n, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < stop; ++i) {
      const int64_t owner = owner_of<kMapped>(keys[i], owners);
      if constexpr (kMapped) {
        if (owner < 0 || owner >= world_size) {
          bad.report(virtual_shard_of(keys[i]));
          continue;
        }
      }
      ++count[owner];
    }
  });
  if (bad.position() >= 0) return bad.position();

  int64_t position = 0;
  for (int64_t owner = 0; owner < world_size; ++owner) {
    const int64_t start = position;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      position += std::exchange(next[chunk * world_size + owner], position);
    }
    counts[owner] = position - start;
  }

  parallel_for.each(chunks, [=, owners = owners](int64_t chunk) {
    int64_t* to = next + chunk * world_size;
    const int64_t stop = std::min(n, (chunk + 1) * kChunk);
    for (int64_t i = chunk * kChunk; i < stop; ++i) {
      const int64_t target = to[owner_of<kMapped>(keys[i], owners)]++;
      by_owner[target] = keys[i];
      permutation[target] = i;
    }
  });
  return -1;
}

}  // namespace

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size) {
  return num_chunks(n) * world_size * static_cast<int64_t>(sizeof(int64_t));
}

template <class Key>
int64_t bucketize(const Key* keys, int64_t n, const Owners& owners, Key* by_owner, int64_t* counts,
                  int64_t* permutation, void* workspace, const ParallelFor& parallel_for) {
  const auto sort = owners.map == nullptr ? sort_by_owner<false, Key> : sort_by_owner<true, Key>;
  return sort(keys, n, owners, by_owner, counts, permutation, static_cast<int64_t*>(workspace),
              parallel_for);
}

template decltype(bucketize<int32_t>) bucketize<int32_t>;
template decltype(bucketize<int64_t>) bucketize<int64_t>;

}  // namespace sparsekit::cpu
