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

// Sets out[s] to the sum of data[i] over all i with segment_ids[i] == s. Rows with an id < 0 are
// dropped, and segments without rows get zeros. data [n, dim], segment_ids [n], out [num_segments,
// dim]. Rows are added in groups whose bounds depend only on the ids, not on the number of threads,
// so the result has the same bits every time. Returns -1, or the position of an id >= num_segments;
// in the latter case `out` is unchanged.
template <class T>
int64_t unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                             int64_t num_segments, T* out, void* workspace,
                             const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Returns the workspace size in bytes. It suffices for either value of `deterministic`.
// Preconditions: n < 2^31 and num_segments < 2^32 - 1.
template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments);

// Like the CPU version, but rows with an id >= num_segments are dropped. The caller sets *bad to
// INT64_MAX; it becomes the smallest position of such an id, if there is one. If `deterministic` is
// false, the fastest method is used: float sums may differ in the last bits from run to run, and
// subnormal numbers may be flushed to zero.
template <class T>
void unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                          int64_t num_segments, bool deterministic, T* out, int64_t* bad,
                          void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
