// Replays the steps that rows have missed, for optimizers that move every row in each step.
//
// Under exact Adam, or SGD with momentum, a row moves even without a gradient. The move depends
// only on the row and on two numbers for the step, so it can be postponed until the row is read.
#pragma once

#include <cstdint>

#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// The steps first_step, first_step + 1, ..., first_step + count - 1. `numbers` holds two numbers
// for each step: the arguments of the rule's without_gradient().
struct MissedSteps {
  const double* numbers;  // [count, 2]
  int64_t first_step;
  int64_t count;

  SPARSEKIT_HOST_DEVICE int64_t last_step() const { return first_step + count - 1; }
};

namespace cpu {

// Advances rows from their row_step to missed.last_step(), as if update_rows had been called with a
// zero gradient for each step in between. Sets their row_step to missed.last_step(). `rows` [n]
// lists the rows to advance, which must be distinct; null means all rows. Negative rows are
// skipped. A row_step of 0 marks a row that has never had a gradient; such a row does not move.
// Does nothing if missed.count is 0. Learning rates come from `missed`, not from `rule`. Returns
// -1, or the first position whose row is >= num_rows; then nothing has been changed.
template <class Rule, class T>
int64_t catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                      const MissedSteps& missed, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Like the CPU version, but rows >= num_rows are skipped and reported in *bad, as in gather_rows.
// missed.numbers is in device memory.
template <class Rule, class T>
void catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                   const MissedSteps& missed, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
