#include "sparsekit/bucketize.h"

#include <algorithm>

namespace sparsekit::cpu {
namespace {

// Keys that one thread counts, and later moves, in one go. Fixed, so that the counts of a chunk do
// not depend on the number of threads.
constexpr int64_t kChunk = 16384;

int64_t num_chunks(int64_t n) {
  return (n + kChunk - 1) / kChunk;
}

}  // namespace

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size) {
  return num_chunks(n) * world_size * static_cast<int64_t>(sizeof(int64_t));
}

// Counting sort in two passes over the keys.
template <class Key>
void bucketize(const Key* keys, int64_t n, int64_t world_size, Key* by_owner, int64_t* counts,
               int64_t* permutation, void* workspace, const ParallelFor& parallel_for) {
  const OwnerOf owner_of(world_size);
  const int64_t chunks = num_chunks(n);
  // [chunks, world_size]: how many keys of each owner a chunk has, then where it puts the next one.
  auto* next = static_cast<int64_t*>(workspace);

  parallel_for(0, chunks, 1, [=](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      int64_t* count = next + chunk * world_size;
      std::fill(count, count + world_size, int64_t{0});
      const int64_t stop = std::min(n, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < stop; ++i) ++count[owner_of(keys[i])];
    }
  });

  int64_t position = 0;
  for (int64_t owner = 0; owner < world_size; ++owner) {
    const int64_t start = position;
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
      int64_t& entry = next[chunk * world_size + owner];
      const int64_t count = entry;
      entry = position;
      position += count;
    }
    counts[owner] = position - start;
  }

  parallel_for(0, chunks, 1, [=](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      int64_t* to = next + chunk * world_size;
      const int64_t stop = std::min(n, (chunk + 1) * kChunk);
      for (int64_t i = chunk * kChunk; i < stop; ++i) {
        const int64_t target = to[owner_of(keys[i])]++;
        by_owner[target] = keys[i];
        permutation[target] = i;
      }
    }
  });
}

template void bucketize(const int32_t*, int64_t, int64_t, int32_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);
template void bucketize(const int64_t*, int64_t, int64_t, int64_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);

}  // namespace sparsekit::cpu
