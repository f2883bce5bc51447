// The part of a row that one lane reads or writes.
#pragma once

#include "cuda/row_shape.h"
#include "cuda/simt.cuh"
#include "sparsekit/dtypes.h"

namespace sparsekit::cuda {

// Number of rows that a tile loads before it uses the first.
constexpr int kInFlight = 4;

// The kWidth elements of a row that one lane handles, in their storage type.
template <class S, int kWidth>
struct RowPiece {
  static constexpr int kAccess = kWidth < kWide<S> ? kWidth : kWide<S>;
  simt::Vec<S, kAccess> access[kWidth / kAccess];

  SPARSEKIT_DEVICE void read(const S* from) {
    const auto* vectors = reinterpret_cast<const simt::Vec<S, kAccess>*>(from);
    for (int i = 0; i < kWidth / kAccess; ++i) access[i] = vectors[i];
  }
  SPARSEKIT_DEVICE void write(S* to) const {
    auto* vectors = reinterpret_cast<simt::Vec<S, kAccess>*>(to);
    for (int i = 0; i < kWidth / kAccess; ++i) vectors[i] = access[i];
  }
  SPARSEKIT_DEVICE S& at(int i) { return access[i / kAccess].at[i % kAccess]; }
  SPARSEKIT_DEVICE const S& at(int i) const { return access[i / kAccess].at[i % kAccess]; }
};

// to[0 : kWidth] = sum, rounded to the type of the row.
template <class T, int kWidth>
SPARSEKIT_DEVICE void write_row(T* to, const Acc<T> (&sum)[kWidth]) {
  RowPiece<T, kWidth> piece;
  for (int i = 0; i < kWidth; ++i) piece.at(i) = store<T>(sum[i]);
  piece.write(to);
}

}  // namespace sparsekit::cuda
