// Arguments of optimizer ops: a weight, its states, a rule's name and settings, and the tables
// updated in one step.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "kept_list.h"
#include "sparsekit/device_memory.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/update_rows.h"

namespace sparsekit::ops {

// Checks and returns the weight, states and row steps of a table, all of which the op writes to.
// States must be [num_rows, dim]; the last state of a row-wise rule must be [num_rows, 1] or
// [num_rows]. There may be gaps between rows, except in row_step.
template <class T>
RowTable<T> row_table(Arguments& given, const View& weight, const View* states, size_t num_states,
                      const View* row_step, bool row_wise) {
  given.written_rows("weight", weight);
  RowTable<T> table{};
  std::tie(table.num_rows, table.dim) = given.check_dim("weight", weight, 2);
  table.stride = given.row_stride("weight", weight);
  given.check_row_size("weight", table.dim);
  for (size_t k = 0; k < num_states; ++k) {
    const Item name("states", k);
    const View& state = given.written_rows(name, states[k], kAccumulateType<T>);
    const bool of_row = row_wise && k + 1 == num_states;
    const bool is_vector = of_row && state.dim() == 1;
    const auto [rows, width] = given.check_dim(name, state, is_vector ? 1 : 2);
    given.check(rows == table.num_rows, name, " must have size ", table.num_rows,
                " in dimension 0, got ", rows);
    table.strides[k] = given.row_stride(name, state);
    const int64_t expected = of_row ? 1 : table.dim;
    given.check(width == expected, name, " must have size ", expected, " in dimension 1, got ",
                width);
    table.states[k] = mutable_data<Acc<T>>(state);
  }
  if (row_step != nullptr) {
    given.written("row_step", *row_step, ScalarType::Int, 1);
    given.check_size("row_step", *row_step, 0, table.num_rows);
    table.row_step = mutable_data<int32_t>(*row_step);
  }
  table.weight = mutable_data<T>(weight);
  return table;
}

// Checks the tensor `lr` and returns its address as a learning rate. Without a tensor, returns
// `number`.
inline Rate rate_of(Arguments& given, const std::optional<Tensor>& lr, double number) {
  if (!lr.has_value()) return number;
  given.check_one("lr", given.read("lr", *lr));
  const ScalarType dtype = dtype_of(*lr);
  if (dtype == ScalarType::Float) return Rate(data<float>(*lr));
  given.check(dtype == ScalarType::Double, "lr must be float32 or float64, got ",
              torch::headeronly::toString(dtype));
  return Rate(data<double>(*lr));
}

// Calls body(rule) with the rule of this name. Comments below list each rule's settings. If several
// structs have the same name, the number of states selects one. A tensor `lr` replaces the first
// setting.
template <class Body>
void dispatch_rule(Arguments& given, const std::string& name, const std::vector<double>& settings,
                   const std::optional<Tensor>& lr, size_t states, Body&& body) {
  const auto takes = [&](const char* rule, size_t count, bool right_states) {
    if (name != rule) return false;
    given.check(settings.size() == count, "settings of ", name, " must be ", count, ", got ",
                settings.size());
    given.check(right_states, name, " cannot have ", states, " states");
    return true;
  };
  const auto& v = settings;
  const auto rate = [&] { return rate_of(given, lr, v[0]); };
  if (takes("sgd", 4, states <= 1)) {  // lr, momentum, weight_decay, nesterov
    if (states == 0) return body(Sgd<false>{rate(), v[1], v[2], v[3] != 0});
    return body(Sgd<true>{rate(), v[1], v[2], v[3] != 0});
  }
  // Settings: lr, beta1, beta2, eps, weight_decay, rescale_eps
  if (takes("adam", 6, states == 2 || states == 3)) {
    if (states == 2) return body(Adam<false>{rate(), v[1], v[2], v[3], v[4], v[5] != 0});
    return body(Adam<true>{rate(), v[1], v[2], v[3], v[4], v[5] != 0});
  }
  // Settings: lr, lr_decay, eps, weight_decay, decoupled
  if (takes("adagrad", 5, states == 1)) {
    return body(Adagrad{rate(), v[1], v[2], v[3], v[4] != 0});
  }
  if (takes("row_wise_adagrad", 5, states == 1)) {
    const Adagrad rule{rate(), v[1], v[2], v[3], v[4] != 0};
    if (rule.weight_decay == 0 || rule.decoupled) return body(RowWiseAdagrad<false>{rule});
    return body(RowWiseAdagrad<true>{rule});
  }
  // Settings: lr, alpha, eps, momentum, eps_inside, weight_decay, decoupled
  if (takes("rms_prop", 7, states == 1 || states == 2)) {
    if (states == 1)
      return body(RmsProp<false>{rate(), v[1], v[2], v[3], v[4] != 0, v[5], v[6] != 0});
    return body(RmsProp<true>{rate(), v[1], v[2], v[3], v[4] != 0, v[5], v[6] != 0});
  }
  // Settings: lr, l1, l2, lr_power
  if (takes("ftrl", 4, states == 2)) return body(Ftrl{rate(), v[1], v[2], v[3]});
  // Settings: lr, beta1, beta2, eps, weight_decay
  if (takes("partial_row_wise_adam", 5, states == 2)) {
    return body(PartialRowWiseAdam{Adam<false>{rate(), v[1], v[2], v[3], v[4], true}});
  }
  if (takes("lamb", 5, states == 2)) return body(Lamb{rate(), v[1], v[2], v[3], v[4]});
  given.error("rule must be sgd, adam, adagrad, row_wise_adagrad, rms_prop, ftrl, ",
              "partial_row_wise_adam or lamb, got ", name);
}

// Lists with one tensor per table, with two exceptions: `states` has all states of the first table,
// then all states of the second table, and so on; `row_steps` may be empty.
struct TableLists {
  Arguments& given;
  Views weights, states, row_steps, steps;

  size_t size() const { return weights.size(); }
  size_t num_states() const { return states.size() / size(); }

  template <class List>
  void check_one_each(const char* name, const List& list, bool may_be_none) const {
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

  // Checks and returns table i with its step counter.
  template <class T>
  SteppedTable<T> read_table(size_t i, StepNumber number, bool row_wise) const {
    given.check_dtype("weight", weights[i], dtype_of(weights[0]));
    const View* row_step = row_steps.empty() ? nullptr : &row_steps[i];
    SteppedTable<T> table{row_table<T>(given, weights[i], states.begin() + i * num_states(),
                                       num_states(), row_step, row_wise),
                          nullptr};
    const View& step = steps[i];
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

// Calls body(TypeTag<T>, rule), where T is the type of the weights and `rule` has the given name.
template <class Body>
void dispatch_step(const TableLists& lists, const std::string& rule,
                   const std::vector<double>& settings, const std::optional<Tensor>& lr,
                   bool per_row, const Body& body) {
  Arguments& given = lists.given;
  given.check(!per_row || !lists.row_steps.empty(), "per_row needs row_steps");
  given.dispatch_rows("weight", lists.weights[0], [&](auto tag) {
    dispatch_rule(given, rule, settings, lr, lists.num_states(), [&](const auto& chosen) {
      given.check(!per_row || std::decay_t<decltype(chosen)>::kPerRow,
                  "rows cannot count their own steps under ", rule);
      body(tag, chosen);
    });
  });
}

// On a device: returns the invalid row reported by a call for several tables. With checks off,
// returns no row.
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
