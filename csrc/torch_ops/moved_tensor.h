// Checks tensors that have one row for each row of a table, and whose rows move when table rows are
// dropped.
#pragma once

#include <cstring>

#include "arguments.h"
#include "sparsekit/move_rows.h"

namespace sparsekit::ops {

// Checks a tensor and the initial value of its elements, and returns both.
inline MovedTensor moved_tensor(Arguments& given, size_t i, const Tensor& tensor,
                                const Tensor& initial, int64_t n, const char* each) {
  const Item name("tensors", i), of_initial("initial", i);
  given.written_rows(name, tensor, kAnyDtype);
  const int64_t dim = tensor.dim();
  given.check(dim >= 1, name, " must have at least 1 dimension");
  given.check(tensor.size(0) >= n, name, " must have at least ", n, " rows, one for each ", each,
              ", got ", tensor.size(0));
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

}  // namespace sparsekit::ops
