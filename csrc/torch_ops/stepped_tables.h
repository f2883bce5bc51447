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

// One tensor for a table, but `states` has those of one table after another, and row_steps may be
// empty.
struct TableLists {
  const char* op;
  const std::vector<Tensor>& weights;
  const std::vector<Tensor>& states;
  const std::vector<Tensor>& row_steps;
  const std::vector<Tensor>& steps;

  size_t size() const { return weights.size(); }
  size_t num_states() const { return states.size() / size(); }
  const Tensor* states_of(size_t i) const { return states.data() + i * num_states(); }
  const Tensor* row_step(size_t i) const { return row_steps.empty() ? nullptr : &row_steps[i]; }

  void check_one_each(const char* name, const std::vector<Tensor>& list, bool may_be_none) const {
    check(list.size() == size() || (may_be_none && list.empty()), op, ": ", name, " must have ",
          size(), may_be_none ? " tensors or none, got " : " tensors, one for each weight, got ",
          list.size());
  }
  void check_sizes() const {
    check(!weights.empty(), op, ": there is no weight");
    check_one_each("row_steps", row_steps, true);
    check_one_each("steps", steps, false);
    check(states.size() % size() == 0, op, ": states must have equally many tensors for each of ",
          size(), " weights, got ", states.size());
  }

  // Calls body(i, op) for each table. What it throws names the table, if there are several.
  template <class Body>
  void for_each(const Body& body) const {
    for (size_t i = 0; i < size(); ++i) {
      try {
        body(i, op);
      } catch (const std::invalid_argument&) {
        if (size() == 1) throw;
        body(i, message(op, ": table ", i).c_str());
        throw;
      }
    }
  }

  // Table i and its step, checked.
  template <class T>
  SteppedTable<T> read_table(size_t i, StepNumber number, bool row_wise, const char* op_of) const {
    const Tensor &weight = weights[i], &step = steps[i];
    check_same_device(op_of,
                      {{"the first weight", weights[0]}, {"weight", weight}, {"step", step}});
    check_dtype(weight, dtype_of(weights[0]), op_of, "weight");
    SteppedTable<T> table{
        row_table<T>(weight, states_of(i), num_states(), row_step(i), row_wise, op_of),
        mutable_data<int64_t>(step)};
    check_dtype(step, ScalarType::Long, op_of, "step");
    const int64_t least = number.counted ? 0 : 1;
    const int64_t numbers = step.numel();
    check(numbers == 1, op_of, ": step must be one number >= ", least, ", got ", numbers,
          " numbers");
    if constexpr (!kOnDevice) {
      check(*table.step >= least && *table.step < std::numeric_limits<int64_t>::max(), op_of,
            ": step must be one number >= ", least, ", got ", *table.step);
    }
    return table;
  }

  void add_table(Overlaps& overlaps, size_t i, bool counted) const {
    if (size() > 1) overlaps.of_table(i);
    ops::add_table(overlaps, weights[i], states_of(i), num_states(), row_step(i));
    counted ? overlaps.written("step", steps[i]) : overlaps.read("step", steps[i]);
  }
};

inline Rounding rounding_of(const std::optional<int64_t>& seed) {
  return {seed.has_value(), static_cast<uint64_t>(seed.value_or(0))};
}

// Calls body(TypeTag<T>, rule).
template <class Body>
void dispatch_step(const TableLists& lists, const std::string& rule,
                   const std::vector<double>& settings, bool per_row, const Body& body) {
  const char* op = lists.op;
  check(!per_row || !lists.row_steps.empty(), op, ": per_row needs row_steps");
  dispatch_rows(lists.weights[0], op, "weight", [&](auto tag) {
    dispatch_rule(rule, settings, lists.num_states(), op, [&](const auto& chosen) {
      check(!per_row || std::decay_t<decltype(chosen)>::kPerRow, op,
            ": rows cannot count their own steps under ", rule);
      body(tag, chosen);
    });
  });
}

// On a device: the bad row that a call for several tables has reported. With checks off there is
// none.
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
