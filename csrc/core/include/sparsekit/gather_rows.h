// Copies table rows.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {
namespace cpu {

// Sets out[i] = table[rows[i]], or zeros where rows[i] < 0. A row has row_bytes bytes, of any
// dtype. table [num_rows, row_bytes], where row r begins at byte r * stride_bytes; rows [n], out
// [n, row_bytes]. Returns -1, or the first position whose row is >= num_rows; `out` is then
// undefined.
int64_t gather_rows(const void* table, int64_t num_rows, int64_t row_bytes, int64_t stride_bytes,
                    const int64_t* rows, int64_t n, void* out, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Like the CPU version, but a row >= num_rows gives zeros. The caller sets *bad to INT64_MAX; it
// becomes the smallest position of such a row, if there is one.
void gather_rows(const void* table, int64_t num_rows, int64_t row_bytes, int64_t stride_bytes,
                 const int64_t* rows, int64_t n, void* out, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
