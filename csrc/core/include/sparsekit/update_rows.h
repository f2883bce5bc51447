// One fused optimizer step over the rows that have a gradient, of all tables of a call.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// A table and the number of its step, which stay the same from call to call ...
template <class T>
struct SteppedTable {
  RowTable<T> table;
  int64_t* step;
};

// ... and what a call brings: the gradients grad [n, dim] of the rows `rows` [n], which must be
// distinct. rows null means row i for gradient i.
template <class T>
struct RowGradients {
  const int64_t* rows;
  const T* grad;
  int64_t n;
};

// Number of the step: *step, or one more if that counts the steps made before. With per_row a
// row counts its own steps in row_step and takes the numbers of that count, for rules with kPerRow;
// else row_step, if there is one, is set to the step. A count beyond what row_step can have stays
// at its largest number.
struct StepNumber {
  bool counted;
  bool per_row;

  SPARSEKIT_HOST_DEVICE int64_t get(const int64_t* step) const { return *step + (counted ? 1 : 0); }
};

// A row outside [0, num_rows): its table and its position there. Without one the table is -1.
struct BadRow {
  int64_t table = -1;
  int64_t position = -1;
};

namespace cpu {

// Updates the rows of gradients[i] in tables[i] by the rule. All other rows, and their states, keep
// their bits, as *step does. Returns the first bad row, if there is one; then nothing has been
// changed.
template <class Rule, class T>
BadRow update_rows(const SteppedTable<T>* tables, const RowGradients<T>* gradients,
                   int64_t num_tables, const Rule& rule, StepNumber number, Rounding rounding,
                   const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Up to this many tables travel with the launch. Of more, the launch has what is new in the call,
// and `on_device` is a copy of `tables` there.
constexpr int64_t kTablesOfLaunch = 30;

// One launch for up to 768 tables, or two if rows of some are not aligned to 16 bytes and others
// are. A step is read on the device; nothing happens to a table whose step is below 1. Rows outside
// [0, num_rows) are left out, and the smallest position_of_table(table, position) of them is
// reported in *bad. counts [tables], on the device, or null: how many gradients there are, at most
// n.
template <class Rule, class T>
void update_rows(const SteppedTable<T>* tables, const SteppedTable<T>* on_device,
                 const RowGradients<T>* gradients, int64_t num_tables, const int64_t* counts,
                 const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                 void* stream);

// Adds one to each of the numbers, which are on the device.
void count_steps(int64_t* const* steps, int64_t count, void* stream);

}  // namespace cuda
}  // namespace sparsekit
