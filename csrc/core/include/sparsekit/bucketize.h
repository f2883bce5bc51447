// Keys grouped by the rank that owns them.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// Most ranks there may be.
constexpr int64_t kMaxWorldSize = 2048;

// The rank that owns a key. A narrower key counts as its value in 64 bits.
SPARSEKIT_HOST_DEVICE inline int64_t owner_of(int64_t key, int64_t world_size) {
  return static_cast<int64_t>(static_cast<uint64_t>(key) % static_cast<uint64_t>(world_size));
}

// owner_of for many keys: a multiplication by 1 / world_size in place of the division.
class OwnerOf {
 public:
  explicit OwnerOf(int64_t world_size)
      : world_size_(static_cast<uint64_t>(world_size)), reciprocal_(~uint64_t{0} / world_size_) {}

  SPARSEKIT_HOST_DEVICE int64_t operator()(int64_t key) const {
    __extension__ using uint128 = unsigned __int128;
    const auto unsigned_key = static_cast<uint64_t>(key);
    // reciprocal_ is at most 1 below 2^64 / world_size, so this is the quotient or 1 less.
    const auto quotient =
        static_cast<uint64_t>((static_cast<uint128>(unsigned_key) * reciprocal_) >> 64);
    const uint64_t rest = unsigned_key - quotient * world_size_;
    return static_cast<int64_t>(rest < world_size_ ? rest : rest - world_size_);
  }

 private:
  uint64_t world_size_, reciprocal_;
};

namespace cpu {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// Stable partition of keys [n] by owner: by_owner [n] has the keys of rank 0, then those of rank 1
// and so on, each group in the order of `keys`; counts [world_size] says how many each rank has;
// permutation [n] where each came from: by_owner[i] = keys[permutation[i]].
// world_size in [1, kMaxWorldSize].
template <class Key>
void bucketize(const Key* keys, int64_t n, int64_t world_size, Key* by_owner, int64_t* counts,
               int64_t* permutation, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

int64_t bucketize_workspace_bytes(int64_t n, int64_t world_size);

// As on the CPU; entries of by_owner and permutation beyond n.get() are undefined. n.most < 2^31.
template <class Key>
void bucketize(const Key* keys, DeviceCount n, int64_t world_size, Key* by_owner, int64_t* counts,
               int64_t* permutation, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
