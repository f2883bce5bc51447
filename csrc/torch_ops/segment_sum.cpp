#include "sparsekit/segment_sum.h"

#include "common.h"

namespace sparsekit::ops {
namespace {

Tensor unsorted_segment_sum(Tensor values, Tensor segment_ids, int64_t num_segments) {
  const char* op = "unsorted_segment_sum";
  check_dim(values, 2, op, "data");
  check_dim(segment_ids, 1, op, "segment_ids");
  check_dtype(segment_ids, ScalarType::Long, op, "segment_ids");
  check_size(segment_ids, 0, values.size(0), op, "segment_ids");
  // Beyond any memory; keeps the size of the workspace far from overflow.
  check(num_segments >= 0 && num_segments < (int64_t{1} << 48), op,
        ": num_segments must be in [0, 2^48), got ", num_segments);
  values = torch::stable::contiguous(values);
  segment_ids = torch::stable::contiguous(segment_ids);
  const int64_t n = values.size(0), dim = values.size(1);
  Tensor out = torch::stable::new_empty(values, {num_segments, dim});
  dispatch_rows(values, op, "data", [&](auto tag) {
    using T = typename decltype(tag)::type;
    Tensor memory = workspace(cpu::segment_sum_workspace_bytes<T>(n, dim, num_segments), values);
    const int64_t bad = cpu::unsorted_segment_sum(data<T>(values), int64_data(segment_ids), n, dim,
                                                  num_segments, mutable_data<T>(out),
                                                  memory.mutable_data_ptr(), torch_parallel_for());
    if (bad >= 0) {
      index_error(op, ": segment_ids[", bad, "] is ", int64_data(segment_ids)[bad],
                  ", but num_segments is ", num_segments);
    }
  });
  return out;
}

}  // namespace
}  // namespace sparsekit::ops

STABLE_TORCH_LIBRARY_IMPL(sparsekit, CPU, m) {
  m.impl("unsorted_segment_sum", TORCH_BOX(&sparsekit::ops::unsorted_segment_sum));
}
