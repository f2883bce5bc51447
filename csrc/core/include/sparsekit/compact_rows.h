// Numbers the rows that stay when others go, so that the last rows fill the places that become
// free.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {

namespace cpu {

// Writes new_rows[size]: -1 for a row that goes, and otherwise the row's new number, below size -
// k. Rows below size - k that stay keep their numbers; the others get, in order, the numbers below
// size - k of rows that go. gone[k] must be in [0, size), in ascending order without repeats.
// Returns -1, or the first position in `gone` that is not; new_rows is then unspecified.
int64_t compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows,
                     const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU version, but sets *bad_row to that position.
namespace cuda {

void compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows, int64_t* bad_row,
                  void* stream);

}  // namespace cuda
}  // namespace sparsekit
