#include "sparsekit/segment_sum.h"

#include "cpu/segment_reduce.h"

namespace sparsekit::cpu {

template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments) {
  return SegmentWorkspace<T>::bytes(n, dim, num_segments);
}

template <class T>
int64_t unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                             int64_t num_segments, T* out, void* workspace,
                             const ParallelFor& parallel_for) {
  const SegmentWorkspace<T> work(workspace, n, dim, num_segments);
  const int64_t bad = sort_by_segment(segment_ids, n, num_segments, work.start, work.order);
  if (bad >= 0) return bad;
  reduce_segments<T>(
      segment_ids, dim, num_segments, [=](int64_t i) { return data + i * dim; }, one<T>, work, out,
      parallel_for);
  return -1;
}

#define SPARSEKIT_INSTANTIATE(T)                                                                 \
  template int64_t segment_sum_workspace_bytes<T>(int64_t, int64_t, int64_t);                    \
  template int64_t unsorted_segment_sum(const T*, const int64_t*, int64_t, int64_t, int64_t, T*, \
                                        void*, const ParallelFor&);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
