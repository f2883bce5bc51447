#include "sparsekit/gather_rows.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

Tensor gather_rows(Tensor table, Tensor rows) {
  Arguments given("gather_rows");
  given.read("table", table, kAnyDtype, 2);
  given.read("rows", rows, kAnyDtype, 1);
  given.dispatch_rows("table", table, [](auto) {});  // call it only to check the dtype
  const bool has_rows = table.size(1) <= 1 || table.stride(1) == 1;
  if (!has_rows || table.stride(0) < table.size(1)) table = packed(table);
  rows = given.packed_int64("rows", rows);
  given.check_row_size("table", table.size(1));
  given.check_elements("a result", {rows.numel(), table.size(1)});
  Tensor out = new_output(table, {rows.numel(), table.size(1)});
  const auto element = static_cast<int64_t>(table.element_size());
  const int64_t row_bytes = table.size(1) * element, stride = table.stride(0) * element;
  const DeviceContext context(table);
  int64_t bad = -1;
  if constexpr (kOnDevice) {
    cuda::gather_rows(table.const_data_ptr(), table.size(0), row_bytes, stride, int64_data(rows),
                      rows.numel(), out.mutable_data_ptr(),
                      context.error_word(DeviceError::kGatherRow), context.stream());
    bad = context.error_position(DeviceError::kGatherRow, rows.numel());
  } else {
    bad =
        cpu::gather_rows(table.const_data_ptr(), table.size(0), row_bytes, stride, int64_data(rows),
                         rows.numel(), out.mutable_data_ptr(), torch_parallel_for());
  }
  if (bad >= 0) given.row_error(bad, context.value(rows, bad), "table", table.size(0));
  return out;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("gather_rows", TORCH_BOX(&sparsekit::ops::gather_rows));
}
