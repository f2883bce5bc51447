#include "sparsekit/segment_sum.h"

#include "cpu/segment_reduce.h"

namespace sparsekit::cpu {

namespace {

template <class T>
struct DataRows {
  static constexpr bool scaled = false;
  const T* data;
  int64_t dim;

  template <class F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    for (int64_t i = begin; i < end; ++i) f(i, data + i * dim, Acc<T>{1});
  }
};

}  // namespace

template <class T>
int64_t segment_sum_workspace_bytes(int64_t n, int64_t dim, int64_t num_segments,
                                    const ParallelFor& parallel_for) {
  return Arena::bytes_of<SegmentWorkspace<T>>(n, dim, num_segments, nullptr, parallel_for);
}

template <class T>
int64_t unsorted_segment_sum(const T* data, const int64_t* segment_ids, int64_t n, int64_t dim,
                             int64_t num_segments, T* out, void* workspace,
                             const ParallelFor& parallel_for) {
  return reduce_segments({segment_ids, nullptr}, n, dim, num_segments, DataRows<T>{data, dim},
                         workspace, out, parallel_for);
}

SPARSEKIT_INSTANTIATE(segment_sum_workspace_bytes)
SPARSEKIT_INSTANTIATE(unsorted_segment_sum)

}  // namespace sparsekit::cpu
