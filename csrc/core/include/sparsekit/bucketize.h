// Groups keys by the rank that owns them.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/owner.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

namespace cpu {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// Partitions keys [n] by owner: by_owner [n] receives the keys of rank 0, then the keys of rank 1,
// and so on. The keys of each rank keep their order. counts [world_size] receives the number of
// keys of each rank. permutation [n] receives each key's original position: by_owner[i] =
// keys[permutation[i]]. Returns -1, or the smallest virtual shard of a key that the map assigns to
// an invalid rank; the results are then undefined.
template <class Key>
int64_t bucketize(const Key* keys, int64_t n, const Owners& owners, Key* by_owner, int64_t* counts,
                  int64_t* permutation, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// Like the CPU version, but entries of by_owner and permutation beyond n.get() are undefined.
// Precondition: n.most < 2^31. Keys that the map assigns to an invalid rank are counted for rank 0.
// *bad becomes the smallest virtual shard of such a key, unless it was smaller before.
template <class Key>
void bucketize(const Key* keys, DeviceCount n, const Owners& owners, Key* by_owner, int64_t* counts,
               int64_t* permutation, int64_t* bad, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
