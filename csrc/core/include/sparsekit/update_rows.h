// Makes one fused optimizer step over the rows that have a gradient, for all tables of a call.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// A table and its step number; both stay the same from call to call.
template <class T>
struct SteppedTable {
  RowTable<T> table;
  int64_t* step;
};

// The gradients that a call brings: grad [n, dim] of the rows `rows` [n], which must be distinct.
// With rows null, gradient i is for row i.
template <class T>
struct RowGradients {
  const int64_t* rows;
  const T* grad;
  int64_t n;
};

// The number of a step is *step, or *step + 1 if *step counts the steps made before (`counted`).
// With per_row, for rules with kPerRow, each row counts its own steps in row_step and is updated
// with that count; otherwise row_step, if not null, is set to the step. A count that row_step
// cannot hold stays at its largest value.
struct StepNumber {
  bool counted;
  bool per_row;

  SPARSEKIT_HOST_DEVICE int64_t get(const int64_t* step) const { return *step + (counted ? 1 : 0); }
};

// A row outside [0, num_rows): its table and its position among that table's gradients; -1 if there
// is none.
struct BadRow {
  int64_t table = -1;
  int64_t position = -1;
};

namespace cpu {

// Updates the rows of gradients[i] in tables[i] by the rule. All other rows and their states keep
// their bits, and so does *step. Returns the first bad row, if there is one; then nothing has been
// changed.
template <class Rule, class T>
BadRow update_rows(const SteppedTable<T>* tables, const RowGradients<T>* gradients,
                   int64_t num_tables, const Rule& rule, StepNumber number, Rounding rounding,
                   const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Up to this many tables travel in the launch's arguments. With more, only the gradients do, and
// `on_device` must be a copy of `tables` in device memory.
constexpr int64_t kTablesOfLaunch = 30;

// Makes one launch for up to 768 tables, or two if rows of some are aligned to 16 bytes and rows of
// others are not. The step is read on the device; a table whose step is below 1 is not changed.
// Rows outside [0, num_rows) are skipped, and the smallest position_of_table(table, position) of
// them is reported in *bad. counts [tables], on the device, gives the number of gradients, at most
// n; null means n.
template <class Rule, class T>
void update_rows(const SteppedTable<T>* tables, const SteppedTable<T>* on_device,
                 const RowGradients<T>* gradients, int64_t num_tables, const int64_t* counts,
                 const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                 void* stream);

// Adds one to each of the numbers, which are in device memory.
void count_steps(int64_t* const* steps, int64_t count, void* stream);

}  // namespace cuda
}  // namespace sparsekit
