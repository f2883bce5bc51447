#include "sparsekit/move_rows.h"

#include <algorithm>
#include <cstring>

namespace sparsekit::cpu {
namespace {

// Minimum number of bytes of rows per thread.
constexpr int64_t kBytes = 1 << 16;

void fill_row(char* row, int64_t bytes, const char (&initial)[16]) {
  int64_t at = 0;
  for (; at + 16 <= bytes; at += 16) std::memcpy(row + at, initial, 16);
  std::memcpy(row + at, initial, static_cast<size_t>(bytes - at));
}

}  // namespace

int64_t move_rows(const MovedTensor* tensors, int64_t num_tensors, const int32_t* new_rows,
                  int64_t left, int64_t n, const ParallelFor& parallel_for) {
  for (int64_t row = left; row < n; ++row) {
    if (new_rows[row - left] < -1 || new_rows[row - left] >= left) return row;
  }
  for (const MovedTensor* tensor = tensors; tensor != tensors + num_tensors; ++tensor) {
    if (tensor->row_bytes == 0) continue;  // its memory may be null
    const int64_t grain = std::max<int64_t>(1, kBytes / tensor->row_bytes);
    parallel_for(left, n, grain, [=](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        char* const row = tensor->data + r * tensor->stride_bytes;
        const int64_t to = new_rows[r - left];
        if (to >= 0) {
          std::memcpy(tensor->data + to * tensor->stride_bytes, row,
                      static_cast<size_t>(tensor->row_bytes));
        }
        fill_row(row, tensor->row_bytes, tensor->initial);
      }
    });
  }
  return -1;
}

}  // namespace sparsekit::cpu
