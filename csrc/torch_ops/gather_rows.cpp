#include "sparsekit/gather_rows.h"

#include "device_context.h"

namespace sparsekit::ops {
namespace {

Tensor gather_rows(Tensor table, Tensor rows) {
  const char* op = "gather_rows";
  check_same_device(op, {{"table", table}, {"rows", rows}});
  check_dim(table, 2, op, "table");
  check_dim(rows, 1, op, "rows");
  dispatch_rows(table, op, "table", [](auto) {});  // only its check
  table = packed(table);
  rows = packed_int64(rows, op, "rows");
  check_row_size(table.size(1), op, "table");
  check_elements({rows.numel(), table.size(1)}, op, "a result");
  Tensor out = new_output(table, {rows.numel(), table.size(1)});
  const int64_t row_bytes = table.size(1) * static_cast<int64_t>(table.element_size());
  const DeviceContext context(table);
  int64_t bad = -1;
  if constexpr (kOnDevice) {
    cuda::gather_rows(table.const_data_ptr(), table.size(0), row_bytes, int64_data(rows),
                      rows.numel(), out.mutable_data_ptr(),
                      context.error_word(DeviceError::kGatherRow), context.stream());
    bad = context.error_position(DeviceError::kGatherRow, rows.numel());
  } else {
    bad = cpu::gather_rows(table.const_data_ptr(), table.size(0), row_bytes, int64_data(rows),
                           rows.numel(), out.mutable_data_ptr(), torch_parallel_for());
  }
  if (bad >= 0) {
    index_error(op, ": rows[", bad, "] is ", context.value(rows, bad), ", but table has ",
                table.size(0), " rows");
  }
  return out;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("gather_rows", TORCH_BOX(&sparsekit::ops::gather_rows));
}
