#include "sparsekit/compact_rows.h"

#include <numeric>

namespace sparsekit::cpu {
namespace {

// Minimum number of rows per thread.
constexpr int64_t kRows = 1 << 16;

}  // namespace

int64_t compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows,
                     const ParallelFor& parallel_for) {
  for (int64_t i = 0; i < k; ++i) {
    if (gone[i] <= (i == 0 ? -1 : gone[i - 1]) || gone[i] >= size) return i;
  }
  const int64_t left = size - k;
  parallel_for(0, left, kRows, [=](int64_t begin, int64_t end) {
    std::iota(new_rows + begin, new_rows + end, static_cast<int32_t>(begin));
  });
  int64_t place = 0;  // index in `gone` of the first place not yet assigned
  for (; place < k && gone[place] < left; ++place) new_rows[gone[place]] = -1;
  int64_t next_gone = place;
  place = 0;
  for (int64_t row = left; row < size; ++row) {
    const bool goes = next_gone < k && gone[next_gone] == row;
    new_rows[row] = goes ? -1 : static_cast<int32_t>(gone[place]);
    next_gone += goes;
    place += !goes;
  }
  return -1;
}

}  // namespace sparsekit::cpu
