#include "moved_tensor.h"

namespace sparsekit::ops {
namespace {

void move(Tensors tensors, Tensor new_rows, int64_t left, Tensors initial) {
  Arguments given("move_rows_", Arguments::kWrites);
  given.expect(tensors.size() + 1);
  given.read("new_rows", new_rows, ScalarType::Int, 1);
  given.check_list("initial", initial.size(), tensors.size());
  const int64_t n = new_rows.numel();
  given.check(left >= 0 && left <= n, "left is ", left, ", but must be in [0, ", n, "]");
  std::vector<MovedTensor> moved;
  moved.reserve(tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    moved.push_back(moved_tensor(given, i, tensors[i], initial[i], n, "of new_rows"));
  }
  given.check_apart();
  new_rows = packed(new_rows);
  const DeviceContext context(new_rows);
  const auto count = static_cast<int64_t>(moved.size());
  int64_t bad = -1;
  if constexpr (kOnDevice) {
    cuda::move_rows(moved.data(), count, data<int32_t>(new_rows), left, n,
                    context.error_word(DeviceError::kMovedRow), context.stream());
    bad = context.error_position(DeviceError::kMovedRow, n);
  } else {
    bad = cpu::move_rows(moved.data(), count, data<int32_t>(new_rows) + left, left, n,
                         torch_parallel_for());
  }
  given.check(bad < 0, "new_rows[", bad, "] is ", bad < 0 ? 0 : context.value(new_rows, bad),
              ", but must be in [-1, ", left, ")");
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("move_rows_", TORCH_BOX(&sparsekit::ops::move));
}
