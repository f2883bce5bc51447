#include "sparsekit/segment_sum.h"

#include "device_context.h"

namespace sparsekit::ops {
namespace {

Tensor unsorted_segment_sum(Tensor values, Tensor segment_ids, int64_t num_segments,
                            bool deterministic) {
  const char* op = "unsorted_segment_sum";
  check_same_device(op, {{"data", values}, {"segment_ids", segment_ids}});
  check_dim(values, 2, op, "data");
  check_dim(segment_ids, 1, op, "segment_ids");
  check_size(segment_ids, 0, values.size(0), op, "segment_ids");
  check_sort_sizes(segment_ids.numel(), num_segments, op, "num_segments");
  values = packed(values);
  segment_ids = packed_int64(segment_ids, op, "segment_ids");
  const int64_t n = values.size(0), dim = values.size(1);
  check_row_size(dim, op, "data");
  check_elements({num_segments, dim}, op, "a result");
  const DeviceContext context(values);
  Tensor out = new_output(values, {num_segments, dim});
  dispatch_rows(values, op, "data", [&](auto tag) {
    using T = typename decltype(tag)::type;
    int64_t bad = -1;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::segment_sum_workspace_bytes<T>(n, dim, num_segments), values);
      cuda::unsorted_segment_sum(data<T>(values), int64_data(segment_ids), n, dim, num_segments,
                                 deterministic, mutable_data<T>(out),
                                 context.error_word(DeviceError::kSegmentId), memory.data(),
                                 context.stream());
      bad = context.error_position(DeviceError::kSegmentId, n);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(
          cpu::segment_sum_workspace_bytes<T>(n, dim, num_segments, parallel_for), values);
      bad =
          cpu::unsorted_segment_sum(data<T>(values), int64_data(segment_ids), n, dim, num_segments,
                                    mutable_data<T>(out), memory.data(), parallel_for);
    }
    if (bad >= 0) {
      index_error(op, ": segment_ids[", bad, "] is ", context.value(segment_ids, bad),
                  ", but num_segments is ", num_segments);
    }
  });
  return out;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("unsorted_segment_sum", TORCH_BOX(&sparsekit::ops::unsorted_segment_sum));
}
