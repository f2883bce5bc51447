#include "sparsekit/compact_rows.h"

#include <limits>

#include "arguments.h"

namespace sparsekit::ops {
namespace {

Tensor compact(Tensor gone, int64_t size) {
  Arguments given("compact_rows");
  given.read("gone", gone, ScalarType::Long, 1);
  const int64_t k = gone.numel();
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  given.check(size >= k && size <= kMost, "size is ", size, ", but must be in [", k, ", ", kMost,
              "], from the length of gone to 2^31 - 1");
  gone = packed(gone);
  const DeviceContext context(gone);
  Tensor new_rows = new_output(gone, {size}, ScalarType::Int);
  int64_t bad = -1;
  if constexpr (kOnDevice) {
    cuda::compact_rows(int64_data(gone), k, size, mutable_data<int32_t>(new_rows),
                       context.error_word(DeviceError::kGoneRow), context.stream());
    bad = context.error_position(DeviceError::kGoneRow, k);
  } else {
    bad = cpu::compact_rows(int64_data(gone), k, size, mutable_data<int32_t>(new_rows),
                            torch_parallel_for());
  }
  given.check(bad < 0, "gone[", bad, "] is ", bad < 0 ? 0 : context.value(gone, bad),
              ", but must be in [0, ", size, ") and above the number before it");
  return new_rows;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("compact_rows", TORCH_BOX(&sparsekit::ops::compact));
}
