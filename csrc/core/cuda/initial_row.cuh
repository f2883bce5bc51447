// Writes initial vectors, four columns at a time. One random draw gives four columns.
#pragma once

#include "cuda/row_shape.h"
#include "cuda/simt.cuh"
#include "sparsekit/initial_values.h"

namespace sparsekit::cuda {

constexpr int kDrawColumns = 4;
// Number of elements in the widest access that stays within the columns of a draw.
template <class T>
constexpr int kDrawWidth = kWide<T> < kDrawColumns ? kWide<T> : kDrawColumns;

// Returns true if all rows of an array that begins at `out`, with rows `stride` elements apart, are
// aligned for accesses of kDrawWidth elements.
template <class T>
SPARSEKIT_HOST_DEVICE bool draws_are_aligned(const T* out, int64_t dim, int64_t stride) {
  return dim % kDrawColumns == 0 && stride % kDrawColumns == 0 &&
         reinterpret_cast<uintptr_t>(out) % 16 == 0;
}

// Writes the columns [column, column + 4) of a key's row, up to the end of the row.
template <class T, int kWidth>
SPARSEKIT_DEVICE void write_initial(T* row, int64_t dim, int64_t column,
                                    const Initializer& initializer, int64_t key) {
  float values[kDrawColumns];
  initial_values(initializer, key, column / kDrawColumns, values);
#pragma unroll
  for (int j = 0; j < kDrawColumns; j += kWidth) {
    if (kWidth == 1 && column + j >= dim) break;
    simt::Vec<T, kWidth> part;
    for (int k = 0; k < kWidth; ++k) part.at[k] = store<T>(Acc<T>{values[j + k]});
    *reinterpret_cast<simt::Vec<T, kWidth>*>(row + column + j) = part;
  }
}

}  // namespace sparsekit::cuda
