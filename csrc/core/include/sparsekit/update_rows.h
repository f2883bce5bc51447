// Makes one optimizer step for all rows with a gradient, in all tables of a call.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/parallel.h"
#include "sparsekit/row_table.h"

namespace sparsekit {

// A table and a pointer to its step count. These fields do not change from call to call.
template <class T>
struct SteppedTable {
  RowTable<T> table;
  int64_t* step;
};

// The gradients of one table in a call: grad [n, dim] for the rows `rows` [n], which must be
// distinct. If `rows` is null, gradient i is for row i.
template <class T>
struct RowGradients {
  const int64_t* rows;
  const T* grad;
  int64_t n;
};

// Determines a step's number. If `counted` is true, *step is the number of steps made so far, and
// the step's number is *step + 1; otherwise it is *step. If per_row is true, each row counts its
// own steps in row_step and is updated with that count; this requires a rule with kPerRow. If
// per_row is false and row_step is not null, row_step is set to the step number. Counts in row_step
// saturate at the largest int32.
struct StepNumber {
  bool counted;
  bool per_row;

  SPARSEKIT_HOST_DEVICE int64_t get(const int64_t* step) const { return *step + (counted ? 1 : 0); }
};

// Identifies a row outside [0, num_rows) by its table and its position among the table's gradients.
// Both fields are -1 if there is no such row.
struct BadRow {
  int64_t table = -1;
  int64_t position = -1;
};

namespace cpu {

// Applies the rule to the rows of tables[i] that gradients[i] lists. Does not change other rows or
// their states, and does not change *step. Returns the first bad row, if there is one; in that case
// nothing has been changed.
template <class Rule, class T>
BadRow update_rows(const SteppedTable<T>* tables, const RowGradients<T>* gradients,
                   int64_t num_tables, const Rule& rule, StepNumber number, Rounding rounding,
                   const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Maximum number of tables passed as launch arguments. With more tables, only the gradients are
// passed this way, and `on_device` must be a copy of `tables` in device memory.
constexpr int64_t kTablesOfLaunch = 30;

// Like the CPU version. Makes one launch for up to 768 tables, or two launches if the rows of only
// some tables are aligned to 16 bytes. The step number is read on the device; a table whose step
// number is below 1 is left unchanged. Rows outside [0, num_rows) are skipped, and *bad becomes the
// smallest position_of_table(table, position) of such a row. counts [tables], in device memory, is
// the number of gradients of each table, at most n; null means n.
template <class Rule, class T>
void update_rows(const SteppedTable<T>* tables, const SteppedTable<T>* on_device,
                 const RowGradients<T>* gradients, int64_t num_tables, const int64_t* counts,
                 const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                 void* stream);

// Adds one to each step count *steps[i], for i in [0, count). The counts are in device memory.
void count_steps(int64_t* const* steps, int64_t count, void* stream);

}  // namespace cuda
}  // namespace sparsekit
