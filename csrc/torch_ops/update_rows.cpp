#include "sparsekit/update_rows.h"

#include "stepped_tables.h"

namespace sparsekit::ops {
namespace {

constexpr const char* kOp = "update_rows_";

// The lists of a call, of which that of rows may be empty.
struct Lists : TableLists {
  std::vector<Tensor>& rows;
  std::vector<Tensor>& grads;

  void check_sizes(const std::optional<Tensor>& num_grads) const {
    TableLists::check_sizes();
    check_one_each("rows", rows, true);
    check_one_each("grads", grads, false);
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
      add_table(overlaps, i, counted);
      if (!rows.empty()) overlaps.read("rows", rows[i]);
      overlaps.read("grad", grads[i]);
    }
    overlaps.read("num_grads", num_grads);
    overlaps.check();
  }
};

// The gradients of table i, checked; they and their rows become contiguous.
template <class T>
RowGradients<T> read_gradients(const Lists& lists, size_t i, const char* op) {
  const Tensor& weight = lists.weights[i];
  Tensor& grad = lists.grads[i];
  RowGradients<T> gradients{};
  check_same_device(op, {{"weight", weight}, {"grad", grad}});
  check_dim(grad, 2, op, "grad");
  check_size(grad, 1, weight.size(1), op, "grad");
  check_dtype(grad, weight.scalar_type(), op, "grad");
  if (lists.rows.empty()) {
    check_size(grad, 0, weight.size(0), op, "grad");
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
  return gradients;
}

// As cpu::update_rows, but with checks off it sees no bad row.
template <class Rule, class T>
BadRow update_on_device(const DeviceContext& context, const std::vector<SteppedTable<T>>& tables,
                        const std::vector<RowGradients<T>>& gradients, const int64_t* counts,
                        const Rule& rule, StepNumber number, Rounding rounding) {
  const auto num_tables = static_cast<int64_t>(tables.size());
  std::optional<Tensor> copy;
  if (num_tables > cuda::kTablesOfLaunch) {
    copy = context.cached_copy(tables.data(),
                               num_tables * static_cast<int64_t>(sizeof(SteppedTable<T>)));
  }
  const auto* on_device = copy ? data<SteppedTable<T>>(*copy) : nullptr;
  cuda::update_rows(tables.data(), on_device, gradients.data(), num_tables, counts, rule, number,
                    rounding, context.error_word(DeviceError::kUpdateRow), context.stream());
  const bool by_row = std::any_of(gradients.begin(), gradients.end(),
                                  [](const RowGradients<T>& own) { return own.rows != nullptr; });
  return found_bad_row(context, by_row ? tables.size() : 0);
}

template <class Rule, class T>
void update(const Lists& lists, const Rule& rule, StepNumber number, Rounding rounding,
            const std::optional<Tensor>& num_grads) {
  const size_t count = lists.size();
  std::vector<SteppedTable<T>> tables(count);
  std::vector<RowGradients<T>> gradients(count);
  lists.for_each([&](size_t i, const char* op) {
    tables[i] = lists.read_table<T>(i, number, Rule::kRowWise, op);
    gradients[i] = read_gradients<T>(lists, i, op);
  });
  lists.check_overlaps(num_grads, number.counted);

  const DeviceContext context(lists.weights[0]);
  const int64_t* exact = num_grads.has_value() ? int64_data(*num_grads) : nullptr;
  BadRow bad;
  if constexpr (kOnDevice) {
    bad = update_on_device(context, tables, gradients, exact, rule, number, rounding);
  } else {
    for (size_t i = 0; exact != nullptr && i < count; ++i) {
      gradients[i].n = DeviceCount{gradients[i].n, exact + i}.get();
    }
    bad = cpu::update_rows(tables.data(), gradients.data(), static_cast<int64_t>(count), rule,
                           number, rounding, torch_parallel_for());
  }
  if (bad.table >= 0) {
    const auto i = static_cast<size_t>(bad.table);
    const std::string table = count == 1 ? "" : message(": table ", i);
    index_error(kOp, table, ": rows[", bad.position, "] is ",
                context.value(lists.rows[i], bad.position), ", but weight has ",
                tables[i].table.num_rows, " rows");
  }
  if (number.counted) count_steps(context, tables);
}

void update_rows(std::vector<Tensor> weights, std::vector<Tensor> states,
                 std::vector<Tensor> row_steps, std::vector<Tensor> rows, std::vector<Tensor> grads,
                 std::vector<Tensor> steps, std::string rule, std::vector<double> settings,
                 bool per_row, std::optional<int64_t> rounding_seed, bool count_steps,
                 std::optional<Tensor> num_grads) {
  const Lists lists{{kOp, weights, states, row_steps, steps}, rows, grads};
  lists.check_sizes(num_grads);
  dispatch_step(lists, rule, settings, per_row, [&](auto tag, const auto& chosen) {
    update<std::decay_t<decltype(chosen)>, typename decltype(tag)::type>(
        lists, chosen, {count_steps, per_row}, rounding_of(rounding_seed), num_grads);
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("update_rows_", TORCH_BOX(&sparsekit::ops::update_rows));
}
