// One fused optimizer step over the rows that have a gradient.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// Which step it is. With per_row a row counts its own steps in row_step and takes the numbers of
// that count, for rules with kPerRow; else row_step, if there is one, is set to the step.
// A count beyond what row_step can have stays at its largest number.
struct StepNumber {
  const int64_t* step;
  bool per_row;
};

namespace cpu {

// Updates the rows `rows` [n], which must be distinct, with the gradients grad [n, dim] by the
// rule. rows null means row i for gradient i. All other rows, and their states, keep their bits.
// Returns -1, or the first position whose row is outside [0, num_rows); then nothing has been
// changed.
template <class Rule, class T>
int64_t update_rows(const RowTable<T>& table, const int64_t* rows, const T* grad, int64_t n,
                    const Rule& rule, StepNumber step, Rounding rounding,
                    const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// *step.step is read on the device; nothing happens when it is below 1. Rows outside [0, num_rows)
// are left out and reported in *bad, as in gather_rows.
template <class Rule, class T>
void update_rows(const RowTable<T>& table, const int64_t* rows, const T* grad, DeviceCount n,
                 const Rule& rule, StepNumber step, Rounding rounding, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
