#include "sparsekit/group_embedding_bag.h"

#include <list>

#include "group_gradients.h"

namespace sparsekit::ops {
namespace {

// Allocates an output of pool() with the dtype of `like`.
Tensor new_out(Tensor like, int64_t num_elements) {
  Arguments("group_embedding_bag_out").check_elements("a result", {num_elements});
  return new_output(like, {num_elements});
}

void pool(const Tensors& outs, const Tensors& weights_in, const Tensor& index,
          const std::optional<Tensor>& rows, const std::optional<Tensor>& counts,
          const Tensor& bags, const Tensor& features, const Tensors& sample_weights,
          const std::optional<Tensor>& key_starts, const Tensors& keys, const Tensors& seeds_in,
          const std::optional<Tensor>& initializers) {
  Arguments given("group_embedding_bag_", Arguments::kWrites);
  Views weights(weights_in);
  const Views seeds(seeds_in);
  given.expect(outs.size() + weights.size() + seeds.size() + 2 * keys.size() + 8);
  std::list<Tensor> copies;
  const size_t num_tables = weights.size();
  const ScalarType dtype = weights.empty() ? kAnyDtype : dtype_of(weights[0]);
  for (size_t o = 0; o < outs.size(); ++o) given.written({"outs", o}, outs[o], dtype);
  std::vector<int64_t> dims;
  for (size_t t = 0; t < num_tables; ++t) {
    const Item name("weights", t);
    given.read(name, weights[t], dtype);
    dims.push_back(given.check_dim(name, weights[t], 2).second);
    given.check_row_size("weights", dims[t]);
    // The rows of a weight may be any distance apart, and may overlap.
    if (!weights[t].is_contiguous() && (weights[t].stride(1) != 1 || weights[t].stride(0) < 1)) {
      weights.replace(t, copies.emplace_back(packed(weights[t].tensor())));
    }
  }
  const GroupArguments arguments(
      given, {index, rows, counts, bags, features, sample_weights, key_starts}, keys, num_tables);
  arguments.check_placements(outs, "outs", dims);
  std::vector<Initializer> initial;
  if (initializers.has_value()) {
    given.check(arguments.group.features.empty() || !keys.empty(), "initializers need keys");
    given.read_each("seeds", seeds, ScalarType::Long);
    initial = initializers_of(given, *initializers, seeds, num_tables);
  }
  given.check_apart({weights.id(), seeds.id()});
  if (weights.empty()) return;
  const DeviceContext context(index);
  given.dispatch_rows("weights", weights[0], [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<PooledTable<T>> tables;
    tables.reserve(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const int64_t num_rows = weights[t].size(0);
      const int64_t stride = num_rows > 1 ? weights[t].stride(0) : dims[t];
      PooledTable<T> table{data<T>(weights[t]), num_rows, dims[t], stride, nullptr, 0, nullptr,
                           Initializer{}};
      if (arguments.rows_data() != nullptr && !kOnDevice) {
        table.rows = arguments.rows_data() + arguments.entries_of(t).first;
        table.num_listed = arguments.count_of(t);
      }
      if (!initial.empty()) {
        table.seed = int64_data(seeds[t]);
        table.initializer = initial[t];
      }
      tables.push_back(table);
    }
    const std::vector<FeatureBags<T>> asked = arguments.bags_of<T>(outs, true);
    const auto count = static_cast<int64_t>(asked.size());
    if constexpr (kOnDevice) {
      const cuda::GroupPooling<T> call{
          tables.data(),         static_cast<int64_t>(num_tables),
          asked.data(),          count,
          arguments.entries,     data<int32_t>(arguments.index),
          arguments.rows_data(), arguments.counts ? int64_data(*arguments.counts) : nullptr};
      const Workspace memory(cuda::group_embedding_bag_workspace_bytes(call), index);
      cuda::group_embedding_bag(call, context.error_word(DeviceError::kBagRow),
                                context.error_word(DeviceError::kGroupIndex), context.keeper(),
                                memory.data(), context.stream());
      arguments.check_found(context);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(cpu::group_embedding_bag_workspace_bytes(tables.data(), asked.data(),
                                                                      count, parallel_for),
                             index);
      const int64_t bad = cpu::group_embedding_bag<T>(tables.data(), asked.data(), count,
                                                      {nullptr, data<int32_t>(arguments.index)},
                                                      memory.data(), parallel_for);
      if (bad < 0) return;
      const int64_t number = data<int32_t>(arguments.index)[bad];
      const int64_t t = arguments.table_of(bad);
      const PooledTable<T>& table = tables[t];
      if (table.rows == nullptr) {
        arguments.bad_number("index", bad, number, t, table.num_rows, "rows");
      }
      if (number >= table.num_listed) {
        arguments.bad_number("index", bad, number, t, table.num_listed, "distinct keys");
      }
      arguments.bad_number("rows", arguments.entries_of(t).first + number, table.rows[number], t,
                           table.num_rows, "rows");
    }
  });
}

std::tuple<Tensor, Tensor, Tensor> pool_backward(
    const Tensors& grads, const std::vector<int64_t>& dims, const Tensor& index,
    const std::optional<Tensor>& rows, const Tensor& counts, const Tensor& bags,
    const Tensor& features, const Tensors& sample_weights, const std::optional<Tensor>& key_starts,
    int64_t divisor, bool deterministic) {
  Arguments given("group_embedding_bag_backward");
  given.check(!grads.empty() || dims.empty(), "grads must not be empty");
  const ScalarType dtype = grads.empty() ? kAnyDtype : dtype_of(grads[0]);
  const Gradients gradients(given, grads, dtype, dims,
                            {index, rows, counts, bags, features, sample_weights, key_starts},
                            divisor, true);
  Tensor sorted_rows = new_output(index, {rows ? gradients.rows : 0}, ScalarType::Long);
  Tensor out = new_output(grads.empty() ? index : grads[0], {gradients.elements});
  // The caller needs the row counts in host memory. Device code uses new_empty(), since on the host
  // runner new_output() may return an address without memory.
  const auto count = static_cast<int64_t>(dims.size());
  Tensor num_rows = kOnDevice ? torch::stable::new_empty(features, {count}, ScalarType::Long)
                              : new_output(features, {count}, ScalarType::Long);
  std::copy_n(gradients.counts.data(), dims.size(), mutable_data<int64_t>(num_rows));
  if (grads.empty()) return {sorted_rows, out, num_rows};
  given.dispatch_rows("grads", grads[0], [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto features_of = gradients.arguments.bags_of<T>(gradients.grads, false);
    const std::vector<SummedTable<T>> tables =
        gradients.tables(features_of, mutable_data<T>(out), mutable_data<int64_t>(sorted_rows));
    if constexpr (!kOnDevice) {
      gradients.check_rows(tables, [](size_t) { return kMostElements; });
      gradients.clear_gaps(mutable_data<T>(out));
    }
    gradients.sum(tables, deterministic);
  });
  return {sorted_rows, out, num_rows};
}

void pool_backward_at(const Tensor& out, const std::vector<int64_t>& row_strides,
                      const Tensors& grads, const std::vector<int64_t>& dims, const Tensor& index,
                      const Tensor& rows, const Tensor& counts, const Tensor& bags,
                      const Tensor& features, const Tensors& sample_weights,
                      const std::optional<Tensor>& key_starts,
                      [[maybe_unused]] bool deterministic) {
  Arguments given("group_embedding_bag_backward_at_", Arguments::kWrites);
  given.check(!grads.empty() || dims.empty(), "grads must not be empty");
  const ScalarType dtype = grads.empty() ? kAnyDtype : dtype_of(grads[0]);
  given.written("out", out, dtype);
  // On a device, do not wait for the counts: a sum's position does not depend on the number of
  // rows.
  const Gradients gradients(given, grads, dtype, dims,
                            {index, rows, counts, bags, features, sample_weights, key_starts}, 1,
                            !kOnDevice);
  given.check_list("row_strides", row_strides.size(), dims.size());
  for (size_t t = 0; t < row_strides.size(); ++t) {
    given.check(row_strides[t] >= 1 && row_strides[t] <= kMostElements, "row_strides[", t,
                "] must be in [1, 2^44], got ", row_strides[t]);
  }
  given.check_apart();
  if (grads.empty()) return;
  given.dispatch_rows("grads", grads[0], [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto features_of = gradients.arguments.bags_of<T>(gradients.grads, false);
    const std::vector<SummedTable<T>> tables = gradients.tables<T>(features_of, nullptr, nullptr);
    const SumRoom<T> room{mutable_data<T>(out), out.numel(), row_strides.data()};
    if constexpr (kOnDevice) {
      gradients.sum_at(tables, room);
    } else {
      gradients.check_rows(
          tables, [&](size_t t) { return room.num_rows(static_cast<int64_t>(t), dims[t]); });
      const GradientTaker<T> write = [&](int64_t t, const int64_t* own_rows, const T* grad,
                                         const ParallelFor& parallel_for) {
        const int64_t dim = dims[t], stride = row_strides[t];
        parallel_for(0, gradients.counts[t], 1024, [=](int64_t begin, int64_t end) {
          for (int64_t j = begin; j < end; ++j) {
            std::copy_n(grad + j * dim, dim, room.out + own_rows[j] * stride);
          }
        });
      };
      gradients.sum(tables, true, &write);
    }
  });
}

void pool_update(const Tensors& grads, const Tensor& index, const Tensor& rows,
                 const Tensor& counts, const Tensor& bags, const Tensor& features,
                 const Tensors& sample_weights, const std::optional<Tensor>& key_starts,
                 const Tensors& weights_in, const Tensors& states_in, const Tensors& row_steps_in,
                 const Tensors& steps_in, const std::string& rule,
                 const std::vector<double>& settings, int64_t divisor, bool per_row,
                 std::optional<int64_t> rounding_seed, bool counted,
                 [[maybe_unused]] bool deterministic, const std::optional<Tensor>& lr) {
  Arguments given("group_embedding_bag_update_", Arguments::kWrites);
  const Views weights(weights_in);
  const TableLists lists{given, weights, Views(states_in), Views(row_steps_in), Views(steps_in)};
  lists.check_sizes();
  given.expect(weights.size() * 2 + lists.states.size() + lists.row_steps.size() + grads.size() +
               8);
  std::vector<int64_t> dims;
  for (size_t t = 0; t < weights.size(); ++t) {
    dims.push_back(given.check_dim({"weights", t}, weights[t], 2).second);
  }
  const Gradients gradients(given, grads, dtype_of(weights[0]), dims,
                            {index, rows, counts, bags, features, sample_weights, key_starts},
                            divisor, !kOnDevice);
  const StepNumber number{counted, per_row};
  const Rounding rounding = rounding_of(rounding_seed);
  dispatch_step(lists, rule, settings, lr, per_row, [&](auto tag, const auto& chosen) {
    using T = typename decltype(tag)::type;
    std::vector<SteppedTable<T>> tables(lists.size());
    given.for_each_table(lists.size(), [&](size_t t) {
      tables[t] = lists.read_table<T>(t, number, std::decay_t<decltype(chosen)>::kRowWise);
    });
    given.check_apart(
        {lists.weights.id(), lists.states.id(), lists.row_steps.id(), lists.steps.id()});

    const auto features_of = gradients.arguments.bags_of<T>(gradients.grads, false);
    if constexpr (kOnDevice) {
      gradients.update_on_device(features_of, tables, chosen, number, rounding);
    } else {
      const std::vector<SummedTable<T>> summed = gradients.tables<T>(features_of, nullptr, nullptr);
      gradients.check_rows(summed, [&](size_t t) { return tables[t].table.num_rows; });
      const GradientTaker<T> update = [&](int64_t t, const int64_t* own_rows, const T* grad,
                                          const ParallelFor& parallel_for) {
        const RowGradients<T> of_rows{own_rows, grad, gradients.counts[t]};
        cpu::update_rows(&tables[t], &of_rows, 1, chosen, number, rounding, parallel_for);
      };
      gradients.sum(summed, true, &update);
    }
    if (counted) count_steps(gradients.context, tables);
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_embedding_bag_out", TORCH_BOX(&sparsekit::ops::new_out));
  m.impl("group_embedding_bag_", TORCH_BOX(&sparsekit::ops::pool));
  m.impl("group_embedding_bag_backward", TORCH_BOX(&sparsekit::ops::pool_backward));
  m.impl("group_embedding_bag_backward_at_", TORCH_BOX(&sparsekit::ops::pool_backward_at));
  m.impl("group_embedding_bag_update_", TORCH_BOX(&sparsekit::ops::pool_update));
}
