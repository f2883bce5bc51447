#include "sparsekit/catch_up_rows.h"

#include "row_table.h"

namespace sparsekit::ops {
namespace {

void catch_up_rows(Tensor weight, std::vector<Tensor> states, Tensor row_step,
                   std::optional<Tensor> rows, Tensor numbers, int64_t first_step, std::string rule,
                   std::vector<double> settings) {
  Arguments given("catch_up_rows_", Arguments::kWrites);
  given.dispatch_rows("weight", weight, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_rule(given, rule, settings, std::nullopt, states.size(), [&](const auto& chosen) {
      using Rule = std::decay_t<decltype(chosen)>;
      if constexpr (std::is_same_v<Rule, Sgd<true>> || std::is_same_v<Rule, Adam<false>>) {
        const Views all(states);
        const View of_step(row_step);
        const auto table =
            row_table<T>(given, View(weight), all.begin(), states.size(), &of_step, false);
        given.read("rows", rows, ScalarType::Long, 1);
        given.read("numbers", numbers, ScalarType::Double, 2);
        given.check_size("numbers", numbers, 1, 2);
        given.check(first_step >= 1 && first_step <= kMostNumbered,
                    "first_step must be in [1, 2^31 - 1], got ", first_step);
        given.check(numbers.size(0) <= kMostNumbered - first_step + 1, numbers.size(0),
                    " steps from ", first_step,
                    " on go beyond step 2^31 - 1, the last that row_step can have");
        given.check_apart();
        if (rows.has_value()) rows = packed(*rows);
        numbers = packed(numbers);
        const DeviceContext context(weight);
        const MissedSteps missed{data<double>(numbers), first_step, numbers.size(0)};
        const int64_t n = rows ? rows->numel() : table.num_rows;
        const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
        int64_t bad = -1;
        if constexpr (kOnDevice) {
          cuda::catch_up_rows(table, row_numbers, n, chosen, missed,
                              context.error_word(DeviceError::kCatchUpRow), context.stream());
          bad = context.error_position(DeviceError::kCatchUpRow, rows ? n : 0);
        } else {
          bad = cpu::catch_up_rows(table, row_numbers, n, chosen, missed, torch_parallel_for());
        }
        if (bad >= 0) given.row_error(bad, context.value(*rows, bad), "weight", table.num_rows);
      } else {
        given.error("rows do not move without a gradient under ", rule, " with ", states.size(),
                    " states");
      }
    });
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("catch_up_rows_", TORCH_BOX(&sparsekit::ops::catch_up_rows));
}
