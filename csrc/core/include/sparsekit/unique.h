// Finds distinct keys in order of first occurrence.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/parallel.h"

namespace sparsekit {
namespace cpu {

// Returns the size in bytes of the workspace for unique() with n keys. The workspace must be
// 64-byte aligned.
int64_t unique_workspace_bytes(int64_t n);

// Writes the distinct keys to unique_keys [n], in order of first occurrence. Writes the position of
// each key in unique_keys to inverse [n]. Unless `counts` is null, writes the number of occurrences
// of each distinct key to counts [n]. Returns the number u of distinct keys; elements of
// unique_keys and counts at positions >= u are undefined. `seed` should be unknown to anyone who
// chooses keys; results do not depend on it. Index is int64_t, or int32_t for int64_t keys.
// Precondition: n < 2^31.
template <class Key, class Index>
int64_t unique(const Key* keys, int64_t n, int64_t seed, Key* unique_keys, Index* inverse,
               int64_t* counts, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

int64_t unique_workspace_bytes(int64_t n);

// Like the CPU version, but writes the number of distinct keys to *num_unique in device memory.
// Elements of inverse at positions >= n.get(), and elements of unique_keys and counts at positions
// >= *num_unique, are undefined.
template <class Key>
void unique(const Key* keys, DeviceCount n, int64_t seed, Key* unique_keys, int64_t* inverse,
            int64_t* counts, int64_t* num_unique, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
