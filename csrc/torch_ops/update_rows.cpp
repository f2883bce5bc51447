#include "sparsekit/update_rows.h"

#include <limits>

#include "row_table.h"
#include "sparsekit/device_memory.h"

namespace sparsekit::ops {
namespace {

constexpr const char* kOp = "update_rows_";

// The lists of a call: one tensor for a table, but `states` has those of one table after another,
// and row_steps and rows may be empty.
struct Lists {
  const std::vector<Tensor>& weights;
  const std::vector<Tensor>& states;
  const std::vector<Tensor>& row_steps;
  std::vector<Tensor>& rows;
  std::vector<Tensor>& grads;
  const std::vector<Tensor>& steps;

  size_t size() const { return weights.size(); }
  size_t num_states() const { return states.size() / size(); }
  const Tensor* states_of(size_t i) const { return states.data() + i * num_states(); }
  const Tensor* row_step(size_t i) const { return row_steps.empty() ? nullptr : &row_steps[i]; }

  void check_sizes(const std::optional<Tensor>& num_grads) const {
    check(!weights.empty(), kOp, ": there is no weight");
    const auto one_each = [&](const char* name, size_t count, bool may_be_none) {
      check(count == size() || (may_be_none && count == 0), kOp, ": ", name, " must have ", size(),
            may_be_none ? " tensors or none, got " : " tensors, one for each weight, got ", count);
    };
    one_each("row_steps", row_steps.size(), true);
    one_each("rows", rows.size(), true);
    one_each("grads", grads.size(), false);
    one_each("steps", steps.size(), false);
    check(states.size() % size() == 0, kOp, ": states must have equally many tensors for each of ",
          size(), " weights, got ", states.size());
    if (!num_grads.has_value()) return;
    check_dtype(*num_grads, ScalarType::Long, kOp, "num_grads");
    check(num_grads->numel() == static_cast<int64_t>(size()) && num_grads->is_contiguous(), kOp,
          ": num_grads must have one element for each of ", size(), " tables, got ",
          num_grads->numel());
    check_same_device(kOp, {{"weight", weights[0]}, {"num_grads", *num_grads}});
  }

  void check_overlaps(const std::optional<Tensor>& num_grads, bool counted) const {
    Overlaps overlaps(kOp);
    for (size_t i = 0; i < size(); ++i) {
      if (size() > 1) overlaps.of_table(i);
      add_table(overlaps, weights[i], states_of(i), num_states(), row_step(i));
      if (counted) overlaps.written("step", steps[i]);
      if (!rows.empty()) overlaps.read("rows", rows[i]);
      overlaps.read("grad", grads[i]);
      if (!counted) overlaps.read("step", steps[i]);
    }
    overlaps.read("num_grads", num_grads);
    overlaps.check();
  }
};

// Calls body(i, op) for each table. What it throws names the table, if there are several.
template <class Body>
void for_each_table(size_t count, const Body& body) {
  for (size_t i = 0; i < count; ++i) {
    try {
      body(i, kOp);
    } catch (const std::invalid_argument&) {
      if (count == 1) throw;
      body(i, message(kOp, ": table ", i).c_str());
      throw;
    }
  }
}

// The arguments of table i, checked; rows and gradients become contiguous.
template <class T>
void read_table(const Lists& lists, size_t i, StepNumber number, bool row_wise, const char* op,
                SteppedTable<T>& table, RowGradients<T>& gradients) {
  const Tensor& weight = lists.weights[i];
  Tensor& grad = lists.grads[i];
  const Tensor& step = lists.steps[i];
  check_same_device(
      op,
      {{"the first weight", lists.weights[0]}, {"weight", weight}, {"grad", grad}, {"step", step}});
  check_dtype(weight, lists.weights[0].scalar_type(), op, "weight");
  table.table =
      row_table<T>(weight, lists.states_of(i), lists.num_states(), lists.row_step(i), row_wise, op);
  check_dim(grad, 2, op, "grad");
  check_size(grad, 1, table.table.dim, op, "grad");
  check_dtype(grad, weight.scalar_type(), op, "grad");
  if (lists.rows.empty()) {
    check_size(grad, 0, table.table.num_rows, op, "grad");
    gradients.rows = nullptr;
  } else {
    Tensor& rows = lists.rows[i];
    check_same_device(op, {{"weight", weight}, {"rows", rows}});
    check_dim(rows, 1, op, "rows");
    check_dtype(rows, ScalarType::Long, op, "rows");
    check_size(rows, 0, grad.size(0), op, "rows");
    rows = packed(rows);
    gradients.rows = int64_data(rows);
  }
  grad = packed(grad);
  gradients.grad = data<T>(grad);
  gradients.n = grad.size(0);
  check_dtype(step, ScalarType::Long, op, "step");
  table.step = mutable_data<int64_t>(step);
  const int64_t least = number.counted ? 0 : 1;
  check(step.numel() == 1, op, ": step must be one number >= ", least, ", got ", step.numel(),
        " numbers");
  if constexpr (!kOnDevice) {
    check(*table.step >= least && *table.step < std::numeric_limits<int64_t>::max(), op,
          ": step must be one number >= ", least, ", got ", *table.step);
  }
}

template <class Rule, class T>
void update(const Lists& lists, const Rule& rule, StepNumber number, Rounding rounding,
            const std::optional<Tensor>& num_grads) {
  const size_t count = lists.size();
  std::vector<SteppedTable<T>> tables(count);
  std::vector<RowGradients<T>> gradients(count);
  for_each_table(count, [&](size_t i, const char* op) {
    read_table(lists, i, number, Rule::kRowWise, op, tables[i], gradients[i]);
  });
  lists.check_overlaps(num_grads, number.counted);

  const Engine engine(lists.weights[0]);
  const auto num_tables = static_cast<int64_t>(count);
  const int64_t* exact = num_grads.has_value() ? int64_data(*num_grads) : nullptr;
  BadRow bad;
  if constexpr (kOnDevice) {
    std::optional<Tensor> copy;
    if (num_tables > cuda::kTablesOfLaunch) {
      copy = engine.kept(tables.data(), num_tables * static_cast<int64_t>(sizeof(SteppedTable<T>)));
    }
    const auto* on_device = copy ? data<SteppedTable<T>>(*copy) : nullptr;
    cuda::update_rows(tables.data(), on_device, gradients.data(), num_tables, exact, rule, number,
                      rounding, engine.bad(Complaint::kUpdateRow), engine.stream());
    const int64_t limit = lists.rows.empty() ? 0 : cuda::position_of_table(num_tables, 0);
    const int64_t found = engine.found(Complaint::kUpdateRow, limit);
    if (found >= 0) bad = {cuda::table_of_position(found), cuda::position_in_table(found)};
  } else {
    for (size_t i = 0; exact != nullptr && i < count; ++i) {
      gradients[i].n = DeviceCount{gradients[i].n, exact + i}.get();
    }
    bad = cpu::update_rows(tables.data(), gradients.data(), num_tables, rule, number, rounding,
                           torch_parallel_for());
  }
  if (bad.table >= 0) {
    const auto i = static_cast<size_t>(bad.table);
    const std::string table = count == 1 ? "" : message(": table ", i);
    index_error(kOp, table, ": rows[", bad.position, "] is ",
                engine.value(lists.rows[i], bad.position), ", but weight has ",
                tables[i].table.num_rows, " rows");
  }
  if (!number.counted) return;
  if constexpr (kOnDevice) {
    std::vector<int64_t*> steps;
    for (const SteppedTable<T>& table : tables) steps.push_back(table.step);
    cuda::count_steps(steps.data(), num_tables, engine.stream());
  } else {
    for (const SteppedTable<T>& table : tables) ++*table.step;
  }
}

void update_rows(std::vector<Tensor> weights, std::vector<Tensor> states,
                 std::vector<Tensor> row_steps, std::vector<Tensor> rows, std::vector<Tensor> grads,
                 std::vector<Tensor> steps, std::string rule, std::vector<double> settings,
                 bool per_row, std::optional<int64_t> rounding_seed, bool count_steps,
                 std::optional<Tensor> num_grads) {
  const Lists lists{weights, states, row_steps, rows, grads, steps};
  lists.check_sizes(num_grads);
  check(!per_row || !row_steps.empty(), kOp, ": per_row needs row_steps");
  const Rounding rounding{rounding_seed.has_value(),
                          static_cast<uint64_t>(rounding_seed.value_or(0))};
  dispatch_rows(weights[0], kOp, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_rule(rule, settings, lists.num_states(), kOp, [&](const auto& chosen) {
      using Rule = std::decay_t<decltype(chosen)>;
      check(!per_row || Rule::kPerRow, kOp, ": rows cannot count their own steps under ", rule);
      update<Rule, T>(lists, chosen, {count_steps, per_row}, rounding, num_grads);
    });
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("update_rows_", TORCH_BOX(&sparsekit::ops::update_rows));
}
