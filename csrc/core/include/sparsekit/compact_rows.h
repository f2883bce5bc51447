// Renumbers rows after some are removed: the last rows move into the freed places.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {

namespace cpu {

// Writes new_rows [size]: for a kept row, its new number, which is below size - k; for a removed
// row, -1. Kept rows below size - k keep their numbers; the others get, in order, the numbers of
// removed rows below size - k. gone [k], the removed rows, must be in [0, size), in ascending order
// without repeats. Returns -1, or the first position in `gone` that violates this; new_rows is then
// unspecified.
int64_t compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows,
                     const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU version, but sets *bad_row to the first bad position, if there is one.
namespace cuda {

void compact_rows(const int64_t* gone, int64_t k, int64_t size, int32_t* new_rows, int64_t* bad_row,
                  void* stream);

}  // namespace cuda
}  // namespace sparsekit
