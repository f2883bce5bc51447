// Keys grouped by the rank that owns them.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/owner.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

namespace cpu {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// Stable partition of keys [n] by owner: by_owner [n] has the keys of rank 0, then those of rank 1
// and so on, each group in the order of `keys`; counts [world_size] says how many each rank has;
// permutation [n] where each came from: by_owner[i] = keys[permutation[i]]. Returns -1, or the
// smallest virtual shard of a key that the map gives to no rank; results are then undefined.
template <class Key>
int64_t bucketize(const Key* keys, int64_t n, const Owners& owners, Key* by_owner, int64_t* counts,
                  int64_t* permutation, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// As on the CPU; entries of by_owner and permutation beyond n.get() are undefined. n.most < 2^31.
// *bad becomes the smallest virtual shard that the map gives to no rank, if there is a smaller one
// than it holds and a key there; such keys count as those of rank 0.
template <class Key>
void bucketize(const Key* keys, DeviceCount n, const Owners& owners, Key* by_owner, int64_t* counts,
               int64_t* permutation, int64_t* bad, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
