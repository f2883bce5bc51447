// Moves the last rows of tensors into free places before them, and resets the vacated rows to
// initial values.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {

// A tensor with a row for each row of a table. There may be gaps between its rows.
struct MovedTensor {
  char* data;
  int64_t row_bytes, stride_bytes;
  // An element's initial value, repeated to fill the array.
  alignas(16) char initial[16];
};

namespace cpu {

// Copies each row r in [left, n) to row new_rows[r - left], unless that is -1, and then writes the
// initial value to row r. Returns -1 on success; otherwise changes nothing, and returns the first r
// whose new row is outside [-1, left). No two rows may have the same new row.
int64_t move_rows(const MovedTensor* tensors, int64_t num_tensors, const int32_t* new_rows,
                  int64_t left, int64_t n, const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU version, but new_rows [n] begins with row 0, not with row `left`. Leaves a row as it
// is if its new row is outside [-1, left), and sets *bad_row to the first such row. `tensors` is in
// host memory.
namespace cuda {

void move_rows(const MovedTensor* tensors, int64_t num_tensors, const int32_t* new_rows,
               int64_t left, int64_t n, int64_t* bad_row, void* stream);

}  // namespace cuda
}  // namespace sparsekit
