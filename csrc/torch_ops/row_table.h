// Arguments of optimizer ops: a weight, its states, and the name and settings of a rule.
#pragma once

#include <string>
#include <vector>

#include "arguments.h"
#include "sparsekit/optimizer_rules.h"
#include "sparsekit/row_table.h"

namespace sparsekit::ops {

// Returns the weight, states and row steps of a table, all of which are written to. States must be
// [num_rows, dim]; the last state of a row-wise rule must be [num_rows, 1] or [num_rows]. Rows of
// states need not be contiguous with each other.
template <class T>
RowTable<T> row_table(Arguments& given, const Tensor& weight, const Tensor* states,
                      size_t num_states, const Tensor* row_step, bool row_wise) {
  given.written("weight", weight);
  RowTable<T> table{};
  std::tie(table.num_rows, table.dim) = given.check_dim("weight", weight, 2);
  given.check_row_size("weight", table.dim);
  for (size_t k = 0; k < num_states; ++k) {
    const Item name("states", k);
    const Tensor& state = given.written_rows(name, states[k], kAccumulateType<T>);
    const bool of_row = row_wise && k + 1 == num_states;
    const bool is_vector = of_row && state.dim() == 1;
    const auto [rows, width] = given.check_dim(name, state, is_vector ? 1 : 2);
    given.check(rows == table.num_rows, name, " must have size ", table.num_rows,
                " in dimension 0, got ", rows);
    const int64_t stride = state.stride(0);
    given.check(is_vector || width <= 1 || state.stride(1) == 1, "rows of ", name,
                " must be contiguous");
    given.check(rows <= 1 || stride >= width, "rows of ", name, " must not overlap");
    const int64_t expected = of_row ? 1 : table.dim;
    given.check(width == expected, name, " must have size ", expected, " in dimension 1, got ",
                width);
    table.states[k] = mutable_data<Acc<T>>(state);
    table.strides[k] = stride;
  }
  if (row_step != nullptr) {
    given.written("row_step", *row_step, ScalarType::Int, 1);
    given.check_size("row_step", *row_step, 0, table.num_rows);
    table.row_step = mutable_data<int32_t>(*row_step);
  }
  table.weight = mutable_data<T>(weight);
  return table;
}

// Calls body(rule) with the rule of that name; the comments list each rule's settings. If a rule's
// name stands for several structs, the number of states selects one.
template <class Body>
void dispatch_rule(const Arguments& given, const std::string& name,
                   const std::vector<double>& settings, size_t states, Body&& body) {
  const auto takes = [&](const char* rule, size_t count, bool right_states) {
    if (name != rule) return false;
    given.check(settings.size() == count, "settings of ", name, " must be ", count, ", got ",
                settings.size());
    given.check(right_states, name, " cannot have ", states, " states");
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
  given.error("rule must be sgd, adam, adagrad, row_wise_adagrad, rms_prop, ftrl, ",
              "partial_row_wise_adam or lamb, got ", name);
}

}  // namespace sparsekit::ops
