// Accesses a weight and its states, a few columns at a time.
#pragma once

#include "cuda/row_shape.h"
#include "sparsekit/row_table.h"

namespace sparsekit::cuda {

template <class T, int N>
SPARSEKIT_DEVICE simt::Vec<T, N> read(const T* address) {
  return *reinterpret_cast<const simt::Vec<T, N>*>(simt::global(address));
}
template <class T, int N>
SPARSEKIT_DEVICE void write(T* address, const simt::Vec<T, N>& value) {
  *reinterpret_cast<simt::Vec<T, N>*>(simt::global(address)) = value;
}

// Holds the values of kStates states in kWidth columns.
template <class A, int kWidth, int kStates>
struct TableSlice {
  simt::Vec<A, kWidth> state[kStates == 0 ? 1 : kStates];

  template <class Table>
  SPARSEKIT_DEVICE void read(const Table& table, int64_t row, int64_t column) {
    for (int k = 0; k < kStates; ++k) {
      state[k] = cuda::read<A, kWidth>(table.states[k] + row * table.strides[k] + column);
    }
  }
  template <class Table>
  SPARSEKIT_DEVICE void write(const Table& table, int64_t row, int64_t column) const {
    for (int k = 0; k < kStates; ++k) {
      cuda::write(table.states[k] + row * table.strides[k] + column, state[k]);
    }
  }
  SPARSEKIT_DEVICE void get(int j, A* one) const {
    for (int k = 0; k < kStates; ++k) one[k] = state[k].at[j];
  }
  SPARSEKIT_DEVICE void set(int j, const A* one) {
    for (int k = 0; k < kStates; ++k) state[k].at[j] = one[k];
  }
};

// Returns the shape of a table's rows. Wide accesses require every row of the weight, of the states
// and of `grad` (unless null) to begin at a multiple of 16 bytes.
template <class T>
RowShape shape_of(const RowTable<T>& table, int states, const T* grad) {
  using A = Acc<T>;
  RowShape shape = row_shape<A>(table.dim, table.states[0], table.states[1], table.states[2],
                                table.weight, grad);
  bool aligned = table.stride % kWide<A> == 0;
  for (int k = 0; k < states; ++k) aligned = aligned && table.strides[k] % kWide<A> == 0;
  // If any row is not aligned, use the shape for unaligned rows.
  return aligned ? shape : row_shape<A>(table.dim, reinterpret_cast<const A*>(sizeof(A)));
}

}  // namespace sparsekit::cuda
