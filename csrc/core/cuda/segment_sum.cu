#include "sparsekit/segment_sum.h"

#include "cuda/segment_reduce.cuh"

namespace sparsekit::cuda {

template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments) {
  return Arena::bytes_of<SegmentWorkspace<T>>(n, dim, num_segments);
}

template <class T>
void unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                          int64_t num_segments, bool deterministic, T* out, int64_t* bad,
                          void* workspace, void* stream) {
  Arena arena(workspace);
  const SegmentWorkspace<T> work(arena, n, dim, num_segments);
  const Segments segments{segment_ids, nullptr, n, num_segments, bad};
  reduce_segments<T>(segments, {data, nullptr, dim, dim}, deterministic, out, work, stream);
}

SPARSEKIT_INSTANTIATE(segment_sum_workspace_bytes)
SPARSEKIT_INSTANTIATE(unsorted_segment_sum)

}  // namespace sparsekit::cuda
