#include "sparsekit/update_rows.h"

#include "row_table.h"

namespace sparsekit::ops {
namespace {

// The tensor lists of a call; `rows` may be empty.
struct Lists : TableLists {
  Tensors& rows;
  Tensors& grads;

  void check_sizes(const std::optional<Tensor>& num_grads) const {
    TableLists::check_sizes();
    check_one_each("rows", rows, true);
    check_one_each("grads", grads, false);
    if (!num_grads.has_value()) return;
    given.check_dtype("num_grads", *num_grads, ScalarType::Long);
    given.check(num_grads->numel() == static_cast<int64_t>(size()) && num_grads->is_contiguous(),
                "num_grads must have one element for each of ", size(), " tables, got ",
                num_grads->numel());
  }

  // Makes the gradients and row indices of table i contiguous, checks them and returns them.
  template <class T>
  RowGradients<T> read_gradients(size_t i, const RowTable<T>& table) const {
    Tensor& grad = grads[i];
    RowGradients<T> gradients{};
    if (!rows.empty()) given.read("rows", rows[i], ScalarType::Long, 1);
    given.read("grad", grad, dtype_of(weights[i]));
    const auto [n, dim] = given.check_dim("grad", grad, 2);
    given.check(dim == table.dim, "grad must have size ", table.dim, " in dimension 1, got ", dim);
    if (rows.empty()) {
      given.check_size("grad", grad, 0, table.num_rows);
    } else {
      given.check_size("rows", rows[i], 0, n);
      rows[i] = packed(rows[i]);
      gradients.rows = int64_data(rows[i]);
    }
    grad = packed(grad);
    gradients.grad = data<T>(grad);
    gradients.n = n;
    return gradients;
  }
};

// Like cpu::update_rows, but reports invalid rows only with checks on.
template <class Rule, class T>
BadRow update_on_device(const DeviceContext& context, const std::vector<SteppedTable<T>>& tables,
                        const std::vector<RowGradients<T>>& gradients, const int64_t* counts,
                        const Rule& rule, StepNumber number, Rounding rounding) {
  const auto num_tables = static_cast<int64_t>(tables.size());
  const void* on_device = nullptr;
  if (num_tables > cuda::kTablesOfLaunch) {
    on_device = context.cached_copy(tables.data(),
                                    num_tables * static_cast<int64_t>(sizeof(SteppedTable<T>)));
  }
  cuda::update_rows(tables.data(), static_cast<const SteppedTable<T>*>(on_device), gradients.data(),
                    num_tables, counts, rule, number, rounding,
                    context.error_word(DeviceError::kUpdateRow), context.stream());
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
  Arguments& given = lists.given;
  given.for_each_table(count, [&](size_t i) {
    tables[i] = lists.read_table<T>(i, number, Rule::kRowWise);
    gradients[i] = lists.read_gradients<T>(i, tables[i].table);
  });
  given.read("num_grads", num_grads);
  given.check_apart();

  const DeviceContext context(lists.weights[0].tensor());
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
    given.of_table(i, count);
    given.row_error(bad.position, context.value(lists.rows[i], bad.position), "weight",
                    tables[i].table.num_rows);
  }
  if (number.counted) count_steps(context, tables);
}

void update_rows(Tensors weights, Tensors states, Tensors row_steps, Tensors rows, Tensors grads,
                 Tensors steps, std::string rule, std::vector<double> settings, bool per_row,
                 std::optional<int64_t> rounding_seed, bool count_steps,
                 std::optional<Tensor> num_grads, std::optional<Tensor> lr) {
  Arguments given("update_rows_", Arguments::kWrites);
  const Lists lists{
      {given, Views(weights), Views(states), Views(row_steps), Views(steps)}, rows, grads};
  lists.check_sizes(num_grads);
  dispatch_step(lists, rule, settings, lr, per_row, [&](auto tag, const auto& chosen) {
    update<std::decay_t<decltype(chosen)>, typename decltype(tag)::type>(
        lists, chosen, {count_steps, per_row}, rounding_of(rounding_seed), num_grads);
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("update_rows_", TORCH_BOX(&sparsekit::ops::update_rows));
}
