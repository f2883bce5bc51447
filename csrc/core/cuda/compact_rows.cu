#include "sparsekit/compact_rows.h"

#include "cuda/simt.cuh"

namespace sparsekit::cuda {
namespace {

// Returns how many of the k ascending numbers in `gone` are below `row`.
SPARSEKIT_DEVICE int64_t count_below(const int64_t* gone, int64_t k, int64_t row) {
  int64_t low = 0, high = k;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (gone[middle] < row) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Each thread computes the new number of one row and checks one position in `gone`.
SPARSEKIT_KERNEL compact_rows_kernel(const int64_t* gone, int64_t k, int64_t size,
                                     int32_t* new_rows, int64_t* bad_row) {
  const int64_t left = size - k;
  for (int64_t row = simt::global_thread(); row < size; row += simt::global_threads()) {
    if (row < k) {
      const int64_t before = row == 0 ? -1 : gone[row - 1];
      if (gone[row] <= before || gone[row] < 0 || gone[row] >= size) {
        simt::atomic_min(bad_row, row);
      }
    }
    const int64_t below = count_below(gone, k, row);
    int64_t number = row;
    if (below < k && gone[below] == row) {
      number = -1;
    } else if (row >= left) {
      // The number of kept rows in [left, row). It may be wrong if `gone` is not ascending.
      const int64_t stay = row - left - (below - count_below(gone, k, left));
      number = stay < 0 || stay >= k ? -1 : gone[stay];
    }
    new_rows[row] = static_cast<int32_t>(number);
  }
}

}  // namespace

void compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows, int64_t* bad_row,
                  void* stream) {
  simt::launch("compact_rows", compact_rows_kernel, simt::strided_grid_for(size), stream, gone, k,
               size, new_rows, bad_row);
}

}  // namespace sparsekit::cuda
