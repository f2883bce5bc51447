// Assigns the elements of a row to lanes, and reads and writes them. All kernels that process rows
// use this layout.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/simt.cuh"
#include "sparsekit/dtypes.h"

namespace sparsekit::cuda {

// A tile of 2^log2_lanes adjacent lanes (1 to 32) reads a row. Each lane reads `width` elements in
// one access. Wider rows are split into `columns` slices, one per grid column.
struct RowShape {
  int width;
  int log2_lanes;
  int columns;

  int lanes() const { return 1 << log2_lanes; }
};

// Number of elements of T in the widest access, which is 16 bytes wide.
template <class T>
constexpr int kWide = 16 / static_cast<int>(sizeof(T));

// Returns a shape with kWide<T> elements per lane if every row of every array starts at a multiple
// of 16 bytes. Otherwise, returns a shape with one element per lane. `arrays` are the addresses of
// all arrays of rows of T; null pointers are ignored.
template <class T, class... Arrays>
RowShape row_shape(int64_t dim, const Arrays*... arrays) {
  const bool aligned =
      dim % kWide<T> == 0 && ((reinterpret_cast<uintptr_t>(arrays) % 16 == 0) && ...);
  RowShape shape{aligned ? kWide<T> : 1, 0, 1};
  const int64_t accesses = (dim + shape.width - 1) / shape.width;
  while (shape.log2_lanes < 5 && shape.lanes() < accesses) ++shape.log2_lanes;
  // Use at least one column, so that row indices are checked even if rows have no elements.
  shape.columns = std::max(1, static_cast<int>((accesses + shape.lanes() - 1) / shape.lanes()));
  return shape;
}

// Returns a misaligned address. Pass it to row_shape for an array whose rows are not aligned.
template <class T>
T* misaligned() {
  return reinterpret_cast<T*>(sizeof(T));
}

// Returns a grid with one tile for each of n rows.
inline simt::Grid grid_for_rows(int64_t n, const RowShape& shape, int threads = 256) {
  simt::Grid grid = simt::grid_for(n << shape.log2_lanes, threads);
  grid.columns = shape.columns;
  return grid;
}

// Return the row that this tile handles, and the first element that this lane handles.
SPARSEKIT_DEVICE int64_t tile_of_thread(int log2_lanes) {
  return simt::global_thread() >> log2_lanes;
}
SPARSEKIT_DEVICE int64_t first_element(int width, int log2_lanes) {
  const int lane_in_tile = simt::thread() & ((1 << log2_lanes) - 1);
  return ((static_cast<int64_t>(simt::column()) << log2_lanes) + lane_in_tile) * width;
}

// Number of rows that a tile loads before using the first one.
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

// Rounds `sum` to the type of the row and stores it in to[0 : kWidth].
template <class T, int kWidth>
SPARSEKIT_DEVICE void write_row(T* to, const Acc<T> (&sum)[kWidth]) {
  RowPiece<T, kWidth> piece;
  for (int i = 0; i < kWidth; ++i) piece.at(i) = store<T>(sum[i]);
  piece.write(to);
}

}  // namespace sparsekit::cuda
