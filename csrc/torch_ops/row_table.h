// Arguments of optimizer ops: a weight, its states, and the name and settings of a rule.
#pragma once

#include <string>
#include <vector>

#include "overlap.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/row_table.h"

namespace sparsekit::ops {

// Names of states in errors. The number of states is checked first.
constexpr const char* kStateNames[kMostStates] = {"states[0]", "states[1]", "states[2]"};

// The states must be [num_rows, dim], but the last one of a row-wise rule [num_rows, 1] or
// [num_rows]; rows may lie apart.
template <class T>
RowTable<T> row_table(const Tensor& weight, const Tensor* states, size_t num_states,
                      const Tensor* row_step, bool row_wise, const char* op) {
  check_dim(weight, 2, op, "weight");
  check_mutable(weight, op, "weight");
  check_row_size(weight.size(1), op, "weight");
  RowTable<T> table{};
  table.num_rows = weight.size(0);
  table.dim = weight.size(1);
  for (size_t k = 0; k < num_states; ++k) {
    const char* name = kStateNames[k];
    const Tensor& state = states[k];
    check_same_device(op, {{"weight", weight}, {name, state}});
    const bool of_row = row_wise && k + 1 == num_states;
    const bool is_vector = of_row && state.dim() == 1;
    if (!is_vector) check_dim(state, 2, op, name);
    check_size(state, 0, table.num_rows, op, name);
    const int64_t width = is_vector ? 1 : state.size(1);
    check(is_vector || width <= 1 || state.stride(1) == 1, op, ": rows of ", name,
          " must be contiguous");
    check(table.num_rows <= 1 || state.stride(0) >= width, op, ": rows of ", name,
          " must not overlap");
    check_dtype(state, kAccumulateType<T>, op, name);
    if (!is_vector) check_size(state, 1, of_row ? 1 : table.dim, op, name);
    table.states[k] = mutable_data<Acc<T>>(state);
    table.strides[k] = state.stride(0);
  }
  if (row_step != nullptr) {
    check_same_device(op, {{"weight", weight}, {"row_step", *row_step}});
    check_dim(*row_step, 1, op, "row_step");
    check_size(*row_step, 0, table.num_rows, op, "row_step");
    check_dtype(*row_step, ScalarType::Int, op, "row_step");
    check_mutable(*row_step, op, "row_step");
    table.row_step = mutable_data<int32_t>(*row_step);
  }
  table.weight = mutable_data<T>(weight);
  return table;
}

// Adds what is written to.
inline void add_table(Overlaps& overlaps, const Tensor& weight, const Tensor* states,
                      size_t num_states, const Tensor* row_step) {
  overlaps.written("weight", weight);
  for (size_t k = 0; k < num_states; ++k) overlaps.written(kStateNames[k], states[k]);
  if (row_step != nullptr) overlaps.written("row_step", *row_step);
}

// Calls body(rule) with the rule of that name, whose settings are listed here. Those of one rule
// with more states or fewer are told apart by the number of states.
template <class Body>
void dispatch_rule(const std::string& name, const std::vector<double>& settings, size_t states,
                   const char* op, Body&& body) {
  const auto takes = [&](const char* rule, size_t count, bool right_states) {
    if (name != rule) return false;
    check(settings.size() == count, op, ": settings of ", name, " must be ", count, ", got ",
          settings.size());
    check(right_states, op, ": ", name, " cannot have ", states, " states");
    return true;
  };
  const auto& v = settings;
  if (takes("sgd", 4, states <= 1)) {  // lr, momentum, weight_decay, nesterov
    if (states == 0) return body(Sgd<false>{v[0], v[1], v[2], v[3] != 0});
    return body(Sgd<true>{v[0], v[1], v[2], v[3] != 0});
  }
  // lr, beta1, beta2, eps, weight_decay, rescale_eps
  if (takes("adam", 6, states == 2 || states == 3)) {
    if (states == 2) return body(Adam<false>{v[0], v[1], v[2], v[3], v[4], v[5] != 0});
    return body(Adam<true>{v[0], v[1], v[2], v[3], v[4], v[5] != 0});
  }
  // lr, lr_decay, eps, weight_decay, decoupled
  if (takes("adagrad", 5, states == 1)) {
    return body(Adagrad{v[0], v[1], v[2], v[3], v[4] != 0});
  }
  if (takes("row_wise_adagrad", 5, states == 1)) {
    const Adagrad rule{v[0], v[1], v[2], v[3], v[4] != 0};
    if (rule.weight_decay == 0 || rule.decoupled) return body(RowWiseAdagrad<false>{rule});
    return body(RowWiseAdagrad<true>{rule});
  }
  // lr, alpha, eps, momentum, eps_inside, weight_decay, decoupled
  if (takes("rms_prop", 7, states == 1 || states == 2)) {
    if (states == 1)
      return body(RmsProp<false>{v[0], v[1], v[2], v[3], v[4] != 0, v[5], v[6] != 0});
    return body(RmsProp<true>{v[0], v[1], v[2], v[3], v[4] != 0, v[5], v[6] != 0});
  }
  // lr, l1, l2, lr_power
  if (takes("ftrl", 4, states == 2)) return body(Ftrl{v[0], v[1], v[2], v[3]});
  // lr, beta1, beta2, eps, weight_decay
  if (takes("partial_row_wise_adam", 5, states == 2)) {
    return body(PartialRowWiseAdam{Adam<false>{v[0], v[1], v[2], v[3], v[4], true}});
  }
  if (takes("lamb", 5, states == 2)) return body(Lamb{v[0], v[1], v[2], v[3], v[4]});
  throw std::invalid_argument(message(op, ": rule must be sgd, adam, adagrad, row_wise_adagrad, ",
                                      "rms_prop, ftrl, partial_row_wise_adam or lamb, got ", name));
}

}  // namespace sparsekit::ops
