// Sums rows by segment; segment ids may be in any order.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {
namespace cpu {

// Returns the workspace size in bytes for the segment sum of n rows of `dim` elements of type T.
template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments,
                                    const ParallelFor& parallel_for);

// out[s] = sum of data[i] over the i with segment_ids[i] == s. Rows with an id < 0 are dropped,
// segments without rows are zero. data [n, dim], segment_ids [n], out [num_segments, dim]. Rows are
// added in groups whose bounds depend only on the ids, never on the number of threads, so the
// result has the same bits every time. Returns -1, or the position of an id >= num_segments, in
// which case out is untouched.
template <class T>
int64_t unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                             int64_t num_segments, T* out, void* workspace,
                             const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Returns the workspace size in bytes, for either mode. Preconditions: n < 2^31 and num_segments <
// 2^32 - 1.
template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments);

// If `deterministic`, the order of additions depends only on the ids, as on the CPU. Otherwise the
// fastest method is used: float sums may differ in the last bits from run to run, and subnormal
// numbers may be flushed to zero. The caller sets *bad to INT64_MAX; it becomes the smallest
// position of an id >= num_segments, if there is one. Rows with such an id are dropped.
template <class T>
void unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                          int64_t num_segments, bool deterministic, T* out, int64_t* bad,
                          void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
