// Arguments of the ops that make an optimizer's step on several tables.
#pragma once

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "row_table.h"
#include "sparsekit/device_memory.h"
#include "sparsekit/update_rows.h"

namespace sparsekit::ops {

// Lists with one tensor per table, except that `states` has the states of one table after another,
// and row_steps may be empty.
struct TableLists {
  Arguments& given;
  const Tensors& weights;
  const Tensors& states;
  const Tensors& row_steps;
  const Tensors& steps;

  size_t size() const { return weights.size(); }
  size_t num_states() const { return states.size() / size(); }

  void check_one_each(const char* name, const Tensors& list, bool may_be_none) const {
    given.check(list.size() == size() || (may_be_none && list.empty()), name, " must have ", size(),
                may_be_none ? " tensors or none, got " : " tensors, one for each weight, got ",
                list.size());
  }
  void check_sizes() const {
    given.check(!weights.empty(), "there is no weight");
    check_one_each("row_steps", row_steps, true);
    check_one_each("steps", steps, false);
    given.check(states.size() % size() == 0, "states must have equally many tensors for each of ",
                size(), " weights, got ", states.size());
  }

  // Checks and returns table i and its step.
  template <class T>
  SteppedTable<T> read_table(size_t i, StepNumber number, bool row_wise) const {
    given.check_dtype("weight", weights[i], dtype_of(weights[0]));
    const Tensor* row_step = row_steps.empty() ? nullptr : &row_steps[i];
    SteppedTable<T> table{row_table<T>(given, weights[i], states.data() + i * num_states(),
                                       num_states(), row_step, row_wise),
                          nullptr};
    const Tensor& step = steps[i];
    number.counted ? given.written("step", step, ScalarType::Long)
                   : given.read("step", step, ScalarType::Long);
    table.step = mutable_data<int64_t>(step);
    const int64_t least = number.counted ? 0 : 1;
    const int64_t numbers = step.numel();
    given.check(numbers == 1, "step must be one number >= ", least, ", got ", numbers, " numbers");
    if constexpr (!kOnDevice) {
      given.check(*table.step >= least && *table.step < std::numeric_limits<int64_t>::max(),
                  "step must be one number >= ", least, ", got ", *table.step);
    }
    return table;
  }
};

inline Rounding rounding_of(const std::optional<int64_t>& seed) {
  return {seed.has_value(), static_cast<uint64_t>(seed.value_or(0))};
}

// Calls body(TypeTag<T>, rule) with the dtype of the weights and the rule of that name.
template <class Body>
void dispatch_step(const TableLists& lists, const std::string& rule,
                   const std::vector<double>& settings, bool per_row, const Body& body) {
  const Arguments& given = lists.given;
  given.check(!per_row || !lists.row_steps.empty(), "per_row needs row_steps");
  given.dispatch_rows("weight", lists.weights[0], [&](auto tag) {
    dispatch_rule(given, rule, settings, lists.num_states(), [&](const auto& chosen) {
      given.check(!per_row || std::decay_t<decltype(chosen)>::kPerRow,
                  "rows cannot count their own steps under ", rule);
      body(tag, chosen);
    });
  });
}

// On a device: returns the bad row that a call for several tables has reported; none with checks
// off.
inline BadRow found_bad_row(const DeviceContext& context, size_t num_tables) {
  const int64_t limit = cuda::position_of_table(static_cast<int64_t>(num_tables), 0);
  const int64_t found = context.error_position(DeviceError::kUpdateRow, limit);
  if (found < 0) return {};
  return {cuda::table_of_position(found), cuda::position_in_table(found)};
}

template <class T>
void count_steps(const DeviceContext& context, const std::vector<SteppedTable<T>>& tables) {
  if constexpr (kOnDevice) {
    std::vector<int64_t*> steps;
    for (const SteppedTable<T>& table : tables) steps.push_back(table.step);
    cuda::count_steps(steps.data(), static_cast<int64_t>(steps.size()), context.stream());
  } else {
    for (const SteppedTable<T>& table : tables) ++*table.step;
  }
}

}  // namespace sparsekit::ops
