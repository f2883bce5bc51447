#include "sparsekit/segment_sum.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

Tensor unsorted_segment_sum(Tensor values, Tensor segment_ids, int64_t num_segments,
                            bool deterministic) {
  Arguments given("unsorted_segment_sum");
  given.read("data", values, kAnyDtype, 2);
  given.read("segment_ids", segment_ids, kAnyDtype, 1);
  given.check_size("segment_ids", segment_ids, 0, values.size(0));
  given.check_sort_sizes(segment_ids.numel(), "num_segments", num_segments);
  values = packed(values);
  segment_ids = given.packed_int64("segment_ids", segment_ids);
  const int64_t n = values.size(0), dim = values.size(1);
  given.check_row_size("data", dim);
  given.check_elements("a result", {num_segments, dim});
  const DeviceContext context(values);
  Tensor out = new_output(values, {num_segments, dim});
  given.dispatch_rows("data", values, [&](auto tag) {
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
      given.index_error("segment_ids[", bad, "] is ", context.value(segment_ids, bad),
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
