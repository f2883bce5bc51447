#include "sparsekit/update_rows.h"

#include <torch/csrc/stable/ops.h>

#include "row_table.h"

namespace sparsekit::ops {
namespace {

void update_rows(Tensor weight, std::vector<Tensor> states, std::optional<Tensor> row_step,
                 std::optional<Tensor> rows, Tensor grad, Tensor step, std::string rule,
                 std::vector<double> settings, bool per_row, std::optional<int64_t> rounding_seed,
                 std::optional<Tensor> num_grads, std::optional<Tensor> counter) {
  const char* op = "update_rows_";
  check_same_device(op, {{"weight", weight},
                         {"rows", rows.value_or(grad)},
                         {"grad", grad},
                         {"step", step},
                         {"counter", counter.value_or(step)},
                         {"num_grads", num_grads.value_or(grad)}});
  check_table(weight, states, row_step, op);
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  check_dim(grad, 2, op, "grad");
  check_size(grad, 1, dim, op, "grad");
  check_dtype(grad, weight.scalar_type(), op, "grad");
  if (rows.has_value()) {
    check_dim(*rows, 1, op, "rows");
    check_dtype(*rows, ScalarType::Long, op, "rows");
    check_size(*rows, 0, grad.size(0), op, "rows");
    rows = packed(*rows);
  } else {
    check_size(grad, 0, num_rows, op, "grad");
  }
  check_dtype(step, ScalarType::Long, op, "step");
  check(step.numel() == 1 && (kOnDevice || *int64_data(step) >= 1), op,
        ": step must be one number >= 1");
  if (counter.has_value()) {
    check_dtype(*counter, ScalarType::Long, op, "counter");
    check(counter->numel() == 1, op, ": counter must have one element, got ", counter->numel());
  }
  check(!per_row || row_step.has_value(), op, ": per_row needs row_step");
  grad = packed(grad);
  const DeviceCount n = device_count(grad.size(0), num_grads, op, "num_grads");
  const Engine engine(weight);
  const StepNumber number{int64_data(step), per_row};
  const Rounding rounding{rounding_seed.has_value(),
                          static_cast<uint64_t>(rounding_seed.value_or(0))};
  const auto check_overlaps = [&] {
    Overlaps overlaps = overlaps_of_table(weight, states, row_step, op);
    if (counter.has_value()) overlaps.written("counter", *counter);
    overlaps.read("rows", rows);
    overlaps.read("grad", grad);
    overlaps.read("step", step);
    overlaps.read("num_grads", num_grads);
  };
  int64_t bad = -1;
  dispatch_rows(weight, op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_rule(rule, settings, states.size(), op, [&](const auto& chosen) {
      using Rule = std::decay_t<decltype(chosen)>;
      check(!per_row || Rule::kPerRow, op, ": rows cannot count their own steps under ", rule);
      const auto table = row_table<T>(weight, states, row_step, Rule::kRowWise, op);
      check_overlaps();
      const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
      if constexpr (kOnDevice) {
        cuda::update_rows(table, row_numbers, data<T>(grad), n, chosen, number, rounding,
                          engine.bad(Complaint::kUpdateRow), engine.stream());
        bad = engine.found(Complaint::kUpdateRow, rows ? grad.size(0) : 0);
      } else {
        bad = cpu::update_rows(table, row_numbers, data<T>(grad), n.get(), chosen, number, rounding,
                               torch_parallel_for());
      }
    });
  });
  if (counter.has_value() && bad < 0) torch::stable::copy_(*counter, step);
  if (bad >= 0) {
    index_error(op, ": rows[", bad, "] is ", engine.value(*rows, bad), ", but weight has ",
                num_rows, " rows");
  }
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("update_rows_", TORCH_BOX(&sparsekit::ops::update_rows));
}
