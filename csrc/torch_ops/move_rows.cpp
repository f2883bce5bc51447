#include "sparsekit/move_rows.h"

#include <cstring>

#include "arguments.h"

namespace sparsekit::ops {
namespace {

// Checks a tensor and the initial value of its elements, and returns both.
MovedTensor moved_tensor(Arguments& given, size_t i, const Tensor& tensor, const Tensor& initial,
                         int64_t n) {
  const Item name("tensors", i), of_initial("initial", i);
  given.written_rows(name, tensor, kAnyDtype);
  const int64_t dim = tensor.dim();
  given.check(dim >= 1, name, " must have at least 1 dimension");
  given.check(tensor.size(0) >= n, name, " must have at least ", n,
              " rows, one for each of new_rows, got ", tensor.size(0));
  given.check(initial.is_cpu(), of_initial, " must be on the CPU");
  given.check_dtype(of_initial, initial, dtype_of(tensor));
  given.check_one(of_initial, initial);
  const auto bytes = static_cast<int64_t>(tensor.element_size());
  int64_t width = 1;
  for (int64_t d = dim - 1; d > 0; --d) {
    given.check(tensor.size(d) <= 1 || tensor.stride(d) == width, "rows of ", name,
                " must be contiguous");
    given.check_elements(name, {std::max<int64_t>(width, 1), tensor.size(d)});
    width *= tensor.size(d);
  }
  given.check(tensor.size(0) <= 1 || tensor.stride(0) >= width, "rows of ", name,
              " must not overlap");
  MovedTensor moved{
      static_cast<char*>(tensor.mutable_data_ptr()), width * bytes, tensor.stride(0) * bytes, {}};
  for (int64_t at = 0; at < 16; at += bytes) {
    std::memcpy(moved.initial + at, initial.const_data_ptr(), static_cast<size_t>(bytes));
  }
  return moved;
}

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
    moved.push_back(moved_tensor(given, i, tensors[i], initial[i], n));
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
    bad =
        cpu::move_rows(moved.data(), count, data<int32_t>(new_rows), left, n, torch_parallel_for());
  }
  given.check(bad < 0, "new_rows[", bad, "] is ", bad < 0 ? 0 : context.value(new_rows, bad),
              ", but must be in [-1, ", left, ")");
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("move_rows_", TORCH_BOX(&sparsekit::ops::move));
}
