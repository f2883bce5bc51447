// The steps that rows have missed, for optimizers that move all rows in every step.
//
// Under exact Adam, or SGD with momentum, a row without a gradient still moves. It need not do so
// before it is read: what it does in a step without a gradient depends on the row and on the
// step's numbers only.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// Two numbers for each of the steps first_step, first_step + 1, ..., first_step + count - 1; see
// the rules.
struct MissedSteps {
  const double* numbers;  // [count, 2]
  int64_t first_step;
  int64_t count;

  SPARSEKIT_HOST_DEVICE int64_t last_step() const { return first_step + count - 1; }
};

// Calls use(RULE, T) for every rule whose rows move without a gradient too, and every dtype of
// rows.
#define SPARSEKIT_FOR_EACH_REPLAYED_RULE(use)                                                   \
  use(Sgd<true>, float) use(Sgd<true>, double) use(Sgd<true>, BFloat16) use(Adam<false>, float) \
      use(Adam<false>, double) use(Adam<false>, BFloat16)

namespace cpu {

// Takes each of the rows `rows` [n], distinct, or all of them if null, from the step in row_step to
// missed.last_step(), as if update_rows had been called with a gradient of zeros for each step
// between; row_step says so afterwards. Without a step, nothing changes. A row_step of 0 means a
// row that never had a gradient, which does not move. The rule's own rates are not used. Negative
// rows are left out. Returns -1, or the first position whose row is >= num_rows; then nothing has
// been changed.
template <class Rule, class T>
int64_t catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                      const MissedSteps& missed, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Rows >= num_rows are left out and reported in *bad, as in gather_rows. missed.numbers is on the
// device.
template <class Rule, class T>
void catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                   const MissedSteps& missed, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
