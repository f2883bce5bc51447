#include "sparsekit/catch_up_rows.h"

#include <limits>

#include "row_table.h"

namespace sparsekit::ops {
namespace {

void catch_up_rows(Tensor weight, std::vector<Tensor> states, Tensor row_step,
                   std::optional<Tensor> rows, Tensor numbers, int64_t first_step, std::string rule,
                   std::vector<double> settings) {
  const char* op = "catch_up_rows_";
  check_same_device(op,
                    {{"weight", weight}, {"rows", rows.value_or(weight)}, {"numbers", numbers}});
  if (rows.has_value()) {
    check_dim(*rows, 1, op, "rows");
    check_dtype(*rows, ScalarType::Long, op, "rows");
    rows = packed(*rows);
  }
  check_dim(numbers, 2, op, "numbers");
  check_size(numbers, 1, 2, op, "numbers");
  check_dtype(numbers, ScalarType::Double, op, "numbers");
  constexpr int64_t kMostSteps = std::numeric_limits<int32_t>::max();
  check(first_step >= 1 && first_step <= kMostSteps, op,
        ": first_step must be in [1, 2^31 - 1], got ", first_step);
  check(numbers.size(0) <= kMostSteps - first_step + 1, op, ": ", numbers.size(0), " steps from ",
        first_step, " on go beyond step 2^31 - 1, the last that row_step can have");
  numbers = packed(numbers);
  const DeviceContext context(weight);
  const MissedSteps missed{data<double>(numbers), first_step, numbers.size(0)};
  int64_t bad = -1;
  dispatch_rows(weight, op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_rule(rule, settings, states.size(), op, [&](const auto& chosen) {
      using Rule = std::decay_t<decltype(chosen)>;
      if constexpr (std::is_same_v<Rule, Sgd<true>> || std::is_same_v<Rule, Adam<false>>) {
        const auto table = row_table<T>(weight, states.data(), states.size(), &row_step, false, op);
        Overlaps overlaps(op);
        add_table(overlaps, weight, states.data(), states.size(), &row_step);
        overlaps.read("rows", rows);
        overlaps.read("numbers", numbers);
        overlaps.check();
        const int64_t n = rows ? rows->numel() : table.num_rows;
        const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
        if constexpr (kOnDevice) {
          cuda::catch_up_rows(table, row_numbers, n, chosen, missed,
                              context.error_word(DeviceError::kCatchUpRow), context.stream());
          bad = context.error_position(DeviceError::kCatchUpRow, rows ? n : 0);
        } else {
          bad = cpu::catch_up_rows(table, row_numbers, n, chosen, missed, torch_parallel_for());
        }
      } else {
        throw std::invalid_argument(message(op, ": rows do not move without a gradient under ",
                                            rule, " with ", states.size(), " states"));
      }
    });
  });
  if (bad >= 0) {
    index_error(op, ": rows[", bad, "] is ", context.value(*rows, bad), ", but weight has ",
                weight.size(0), " rows");
  }
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("catch_up_rows_", TORCH_BOX(&sparsekit::ops::catch_up_rows));
}
