// Sums of rows by segment, in any order of the segment ids.
#pragma once

#include <cstdint>

#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

// Bytes of workspace for the segment sum of n rows of `dim` elements of type T.
template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments);

// out[s] = sum of data[i] over the i with segment_ids[i] == s; rows with an id < 0 are dropped,
// segments without rows are zero. data [n, dim], segment_ids [n], out [num_segments, dim].
// Rows are added in groups whose bounds depend on the ids alone, never on the number of threads,
// so the result has the same bits every time. Returns -1, or the position of an id
// >= num_segments, in which case out is untouched.
template <class T>
int64_t unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                             int64_t num_segments, T* out, void* workspace,
                             const ParallelFor& parallel_for);

}  // namespace sparsekit::cpu
