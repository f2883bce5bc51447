#include "sparsekit/init_rows.h"

#include "cuda/initial_row.cuh"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;

// Each lane checks one key, and a tile writes its lanes' new rows one after another. In most
// batches few keys are new, and each known key costs only the read of a row index.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    init_rows_kernel(T* out, int64_t num_rows, int64_t dim, int64_t stride, const int64_t* keys,
                     const int64_t* rows, int64_t n, const int64_t* first_row,
                     Initializer initializer, const int64_t* device_seed, int64_t* bad,
                     int log2_lanes) {
  const int64_t i = simt::global_thread();
  const int64_t first = first_row == nullptr || *first_row < 0 ? 0 : *first_row;
  int64_t row = i >= n ? -1 : rows == nullptr ? i : rows[i];
  if (row < first) {
    row = -1;
  } else if (row >= num_rows) {
    simt::atomic_min(bad, i);
    row = -1;
  }
  if (!simt::warp_any(row >= 0)) return;

  if (device_seed != nullptr) initializer.seed = static_cast<uint64_t>(*device_seed);
  const int64_t key = row < 0 ? 0 : keys[i];
  const int lanes = 1 << log2_lanes;
  const int tile = simt::lane() & ~(lanes - 1);
  const int64_t column = first_element(kDrawColumns, log2_lanes);
  for (int turn = 0; turn < lanes; ++turn) {
    const int64_t target = simt::warp_shuffle(row, tile + turn);
    const int64_t target_key = simt::warp_shuffle(key, tile + turn);
    if (target < 0 || column >= dim) continue;
    write_initial<T, kWidth>(out + target * stride, dim, column, initializer, target_key);
  }
}

}  // namespace

template <class T>
void init_rows(T* out, int64_t num_rows, int64_t dim, int64_t stride, const int64_t* keys,
               const int64_t* rows, int64_t n, const int64_t* first_row,
               const Initializer& initializer, const int64_t* device_seed, int64_t* bad,
               void* stream) {
  if (n <= 0) return;
  const bool wide = draws_are_aligned(out, dim, stride);
  // Use one lane per draw: a draw has as many floats as the widest access.
  const RowShape shape = row_shape<float>((dim + kDrawColumns - 1) / kDrawColumns * kDrawColumns);
  simt::Grid grid = simt::grid_for(n, kThreads);
  grid.columns = shape.columns;
  simt::launch("init_rows", wide ? init_rows_kernel<T, kDrawWidth<T>> : init_rows_kernel<T, 1>,
               grid, stream, out, num_rows, dim, stride, keys, rows, n, first_row, initializer,
               device_seed, bad, shape.log2_lanes);
}

SPARSEKIT_INSTANTIATE(init_rows)

}  // namespace sparsekit::cuda
