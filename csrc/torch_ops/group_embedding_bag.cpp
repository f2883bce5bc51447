#include "sparsekit/group_embedding_bag.h"

#include "group_bags.h"
#include "overlap.h"
#include "stepped_tables.h"

namespace sparsekit::ops {
namespace {

using Tensors = std::vector<Tensor>;

void check_same_dtype(const Tensors& tensors, const char* op, const char* name) {
  for (size_t i = 1; i < tensors.size(); ++i) {
    const ScalarType type = dtype_of(tensors[i]);
    check(type == dtype_of(tensors[0]), op, ": ", name, "[", i, "] must have the dtype of ", name,
          "[0], got ", torch::headeronly::toString(type));
  }
}

// Memory for an output of pool(), in the dtype of `like`.
Tensor new_out(Tensor like, int64_t num_elements) {
  check_elements({num_elements}, "group_embedding_bag_out", "a result");
  return new_output(like, {num_elements});
}

void pool(const Tensors& outs, const Tensors& weights_in, const Tensor& index,
          const std::optional<Tensor>& rows, const std::optional<Tensor>& counts,
          const Tensor& bags, const Tensor& features, const Tensors& sample_weights,
          const std::optional<Tensor>& key_starts, const Tensors& keys, const Tensors& seeds,
          const std::optional<Tensor>& initializers) {
  const char* op = "group_embedding_bag_";
  Tensors weights = weights_in;
  const size_t num_tables = weights.size();
  std::vector<int64_t> dims;
  for (size_t t = 0; t < num_tables; ++t) {
    check_dim(weights[t], 2, op, Item{"weights", t});
    dims.push_back(weights[t].size(1));
    check_row_size(dims[t], op, "weights");
    // Rows may lie anywhere, and overlap.
    if (!weights[t].is_contiguous() && (weights[t].stride(1) != 1 || weights[t].stride(0) < 1)) {
      weights[t] = packed(weights[t]);
    }
  }
  check_same_dtype(weights, op, "weights");
  check_list_device(index, weights, op, "weights");
  const GroupArguments arguments(op, outs, "outs", index, rows, counts, bags, features,
                                 sample_weights, key_starts, keys,
                                 static_cast<int64_t>(num_tables));
  for (size_t o = 0; o < outs.size(); ++o) {
    if (!outs[o].is_contiguous()) check_mutable(outs[o], op, Item{"outs", o});
    const ScalarType type = dtype_of(outs[o]);
    check(weights.empty() || type == dtype_of(weights[0]), op, ": outs[", o,
          "] must have the dtype of weights, got ", torch::headeronly::toString(type));
  }
  arguments.check_placements(outs, "outs", dims);
  std::vector<Initializer> initial;
  if (initializers.has_value()) {
    check_list_device(index, seeds, op, "seeds");
    check(arguments.group.features.empty() || !keys.empty(), op, ": initializers need keys");
    initial = initializers_of(*initializers, seeds, num_tables, op);
  }
  Overlaps overlaps(op);
  overlaps.written("outs", outs);
  overlaps.read("weights", weights);
  overlaps.read("index", index);
  overlaps.read("rows", rows);
  overlaps.read("counts", counts);
  overlaps.read("bags", bags);
  overlaps.read("sample_weights", sample_weights);
  overlaps.read("key_starts", key_starts);
  overlaps.read("keys", keys);
  overlaps.read("features", features);
  overlaps.read("seeds", seeds);
  overlaps.read("initializers", initializers);
  overlaps.check();
  if (weights.empty()) return;
  const DeviceContext context(index);
  dispatch_rows(weights[0], op, "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<PooledTable<T>> tables;
    tables.reserve(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      const int64_t num_rows = weights[t].size(0);
      const int64_t stride = num_rows > 1 ? weights[t].stride(0) : dims[t];
      PooledTable<T> table{data<T>(weights[t]), num_rows, dims[t], stride, nullptr, 0, nullptr,
                           Initializer{}};
      if (arguments.rows.has_value() && !kOnDevice) {
        table.rows = data<int32_t>(*arguments.rows) + arguments.entries_of(t).first;
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
          tables.data(),
          static_cast<int64_t>(num_tables),
          asked.data(),
          count,
          arguments.entries,
          data<int32_t>(arguments.index),
          arguments.rows ? data<int32_t>(*arguments.rows) : nullptr,
          arguments.counts ? int64_data(*arguments.counts) : nullptr};
      const Workspace memory(cuda::group_embedding_bag_workspace_bytes(call), index);
      cuda::group_embedding_bag(call, context.error_word(DeviceError::kBagRow),
                                context.error_word(DeviceError::kGroupIndex), memory.data(),
                                context.stream());
      arguments.check_found(context);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(cpu::group_embedding_bag_workspace_bytes(tables.data(), asked.data(),
                                                                      count, parallel_for),
                             index);
      const int64_t bad = cpu::group_embedding_bag<T>(
          tables.data(), asked.data(), count, {nullptr, data<int32_t>(arguments.index)},
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

// Checked inputs of the gradients of all tables.
class Gradients {
 public:
  Tensors grads;  // of outputs
  const GroupArguments arguments;
  const DeviceContext context;
  std::vector<int64_t> counts;     // of rows, for each table; or the most that there can be
  int64_t rows = 0, elements = 0;  // of all tables, where counts are known

  Gradients(const char* op, const Tensors& grads_in, const std::vector<int64_t>& dims,
            const Tensor& index, const std::optional<Tensor>& rows_in, const Tensor& counts_in,
            const Tensor& bags, const Tensor& features, const Tensors& sample_weights,
            const std::optional<Tensor>& key_starts, int64_t divisor, bool knows_counts)
      : grads(grads_in),
        arguments(op, grads, "grads", index, rows_in, counts_in, bags, features, sample_weights,
                  key_starts, {}, static_cast<int64_t>(dims.size())),
        context(index),
        counts(dims.size()),
        op_(op),
        dims_(dims),
        divisor_(divisor) {
    check_same_dtype(grads, op, "grads");
    for (size_t t = 0; t < dims.size(); ++t) {
      check(dims[t] >= 0 && dims[t] <= kMostElements, op, ": dims[", t, "] is ", dims[t]);
      check_row_size(dims[t], op, "a gradient");
    }
    arguments.check_placements(grads, "grads", dims);
    grads = arguments.readable(std::move(grads), dims);
    check(divisor >= 1, op, ": divisor must be at least 1, got ", divisor);
    if (knows_counts) {
      read_counts();
    } else {
      bound_counts();
    }
  }

  // With gradients of all tables in grad [elements] and their rows in sorted_rows [rows], which may
  // be null where they are handed over.
  template <class T>
  std::vector<SummedTable<T>> tables(const std::vector<FeatureBags<T>>& features, T* grad,
                                     int64_t* sorted_rows) const {
    std::vector<SummedTable<T>> tables;
    tables.reserve(dims_.size());
    const std::vector<int64_t>& begins = arguments.group.table_features;
    for (size_t t = 0; t < dims_.size(); ++t) {
      const auto [first_entry, n] = arguments.entries_of(t);
      SummedTable<T> table{features.data() + begins[t],
                           begins[t + 1] - begins[t],
                           first_entry,
                           n,
                           counts[t],
                           dims_[t],
                           grad == nullptr ? nullptr : grad + begins_[t],
                           nullptr,
                           nullptr};
      if (arguments.rows.has_value()) {
        table.rows = data<int32_t>(*arguments.rows) + first_entry;
        table.sorted_rows = sorted_rows;
      }
      tables.push_back(table);
      if (sorted_rows != nullptr) sorted_rows += table.num_rows;
    }
    return tables;
  }

  // Writes zeros between the gradients of tables.
  template <class T>
  void clear_gaps(T* grad) const {
    for (size_t t = 1; t < counts.size(); ++t) {
      std::fill(grad + begins_[t - 1] + counts[t - 1] * dims_[t - 1], grad + begins_[t], T{});
    }
  }

  // On the CPU: raises unless each row of table t is in [0, num_rows(t)).
  template <class T, class NumRows>
  void check_rows(const std::vector<SummedTable<T>>& tables, const NumRows& num_rows) const {
    for (size_t t = 0; t < tables.size(); ++t) {
      for (int64_t j = 0; tables[t].rows != nullptr && j < tables[t].num_rows; ++j) {
        const int64_t row = tables[t].rows[j];
        if (row >= 0 && row < num_rows(t)) continue;
        index_error(op_, ": rows[", tables[t].first_entry + j, "] is ", row,
                    ", which is no row of table ", t);
      }
    }
  }

  // Sums them. A taker is for the CPU alone.
  template <class T>
  void sum(const std::vector<SummedTable<T>>& tables, [[maybe_unused]] bool deterministic,
           [[maybe_unused]] const GradientTaker<T>* taker = nullptr) const {
    const Tensor& index = arguments.index;
    if constexpr (kOnDevice) {
      const cuda::GroupSums<T> sums = on_device(tables);
      const Workspace memory(cuda::group_embedding_bag_backward_workspace_bytes(sums), index);
      cuda::group_embedding_bag_backward(sums, context.error_word(DeviceError::kGroupIndex),
                                         memory.data(), context.stream());
      arguments.check_found(context);
    } else {
      std::vector<int32_t> order(tables.size());
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(
          cpu::group_embedding_bag_backward_workspace_bytes(
              tables.data(), num_tables(), order.data(), parallel_for, taker != nullptr),
          index);
      const int64_t bad = cpu::group_embedding_bag_backward(
          tables.data(), num_tables(), {nullptr, data<int32_t>(index)}, divisor_, order.data(),
          memory.data(), parallel_for, taker);
      if (bad < 0) return;
      const int64_t t = arguments.table_of(bad);
      arguments.bad_number("index", bad, data<int32_t>(index)[bad], t, counts[t], "distinct keys");
    }
  }

  // On a device: sums them to where there is room. With checks on, raises what was wrong.
  template <class T>
  void sum_at(const std::vector<SummedTable<T>>& tables, const SumRoom<T>& room) const {
    const cuda::GroupSums<T> sums = on_device(tables);
    const Workspace memory(cuda::group_embedding_bag_backward_at_workspace_bytes(sums),
                           arguments.index);
    cuda::group_embedding_bag_backward_at(sums, room, context.error_word(DeviceError::kGroupIndex),
                                          context.error_word(DeviceError::kBagRow), memory.data(),
                                          context.stream());
    const int64_t bad_row = context.error_position(DeviceError::kBagRow, arguments.entries);
    arguments.check_found(context);
    if (bad_row < 0) return;
    index_error(op_, ": rows[", bad_row, "] is ", context.value(*arguments.rows, bad_row),
                ", which is no row of its table");
  }

  // On a device: an optimizer's step with them, without a look at how many there are. With checks
  // on, raises what was wrong.
  template <class Rule, class T>
  void update_on_device(const std::vector<FeatureBags<T>>& features,
                        const std::vector<SteppedTable<T>>& tables, const Rule& rule,
                        StepNumber number, Rounding rounding) const {
    const std::vector<SummedTable<T>> summed = this->tables<T>(features, nullptr, nullptr);
    const cuda::GroupSums<T> sums = on_device(summed);
    const Workspace memory(cuda::group_embedding_bag_update_workspace_bytes(sums), arguments.index);
    cuda::group_embedding_bag_update(
        sums, tables.data(), rule, number, rounding, context.error_word(DeviceError::kGroupIndex),
        context.error_word(DeviceError::kUpdateRow), [this] { arguments.check_found(context); },
        memory.data(), context.stream());
    const BadRow bad = found_bad_row(context, tables.size());
    if (bad.table < 0) return;
    int64_t first_bag = 0;
    for (const Feature& feature : arguments.group.features) {
      if (feature.table < bad.table) first_bag += feature.bags;
    }
    const int64_t first = context.value(arguments.bags, first_bag);
    const auto at = std::clamp<int64_t>(first + bad.position, 0, arguments.entries - 1);
    index_error(op_, ": one of rows is ", context.value(*arguments.rows, at),
                ", which is no row of table ", bad.table);
  }

 private:
  int64_t num_tables() const { return static_cast<int64_t>(dims_.size()); }

  void read_counts() {
    context.read(int64_data(*arguments.counts), num_tables(), counts.data());
    for (size_t t = 0; t < dims_.size(); ++t) {
      check(counts[t] >= 0, op_, ": counts[", t, "] is ", counts[t]);
      check_elements({counts[t], dims_[t]}, op_, "a gradient");
      rows += counts[t];
      elements = (elements + kPartElements - 1) / kPartElements * kPartElements;
      begins_.push_back(elements);
      elements += counts[t] * dims_[t];
      check_elements({rows, 1}, op_, "all gradients");
      check_elements({elements, 1}, op_, "all gradients");
    }
    check_sort_sizes(arguments.rows ? rows : 0, rows + num_tables(), op_, "number of all rows");
  }

  // A table has no more rows than entries, and those no more than max_nnz for each bag.
  void bound_counts() {
    const int64_t entries = arguments.entries;
    int64_t longest = 0;
    for (size_t t = 0; t < dims_.size(); ++t) {
      const GroupFeatures& group = arguments.group;
      for (int64_t f = group.table_features[t]; f < group.table_features[t + 1]; ++f) {
        const Feature& feature = group.features[f];
        const bool limited = feature.max_nnz <= entries / std::max<int64_t>(feature.bags, 1);
        const int64_t most = limited ? feature.bags * feature.max_nnz : entries;
        counts[t] = std::min(counts[t] + most, entries);
      }
      check_elements({counts[t], dims_[t]}, op_, "a gradient");
      longest = std::max(longest, dims_[t]);
    }
    check_elements({entries, longest}, op_, "all gradients");
  }

  template <class T>
  cuda::GroupSums<T> on_device(const std::vector<SummedTable<T>>& tables) const {
    return {tables.data(),
            num_tables(),
            arguments.entries,
            data<int32_t>(arguments.bags),
            data<int32_t>(arguments.index),
            arguments.rows ? data<int32_t>(*arguments.rows) : nullptr,
            int64_data(*arguments.counts),
            divisor_};
  }

  const char* op_;
  const std::vector<int64_t>& dims_;
  int64_t divisor_;
  std::vector<int64_t> begins_;  // of each table, in elements
};

std::tuple<Tensor, Tensor> pool_backward(const Tensors& grads, const std::vector<int64_t>& dims,
                                         const Tensor& index, const std::optional<Tensor>& rows,
                                         const Tensor& counts, const Tensor& bags,
                                         const Tensor& features, const Tensors& sample_weights,
                                         const std::optional<Tensor>& key_starts, int64_t divisor,
                                         bool deterministic) {
  const char* op = "group_embedding_bag_backward";
  check(!grads.empty() || dims.empty(), op, ": grads must not be empty");
  const Gradients gradients(op, grads, dims, index, rows, counts, bags, features, sample_weights,
                            key_starts, divisor, true);
  Tensor sorted_rows = new_output(index, {rows ? gradients.rows : 0}, ScalarType::Long);
  Tensor out = new_output(grads.empty() ? index : grads[0], {gradients.elements});
  if (grads.empty()) return {sorted_rows, out};
  dispatch_rows(grads[0], op, "grads", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::vector<FeatureBags<T>> features_of =
        gradients.arguments.bags_of<T>(gradients.grads, false);
    const std::vector<SummedTable<T>> tables =
        gradients.tables(features_of, mutable_data<T>(out), mutable_data<int64_t>(sorted_rows));
    if constexpr (!kOnDevice) {
      gradients.check_rows(tables, [](size_t) { return kMostElements; });
      gradients.clear_gaps(mutable_data<T>(out));
    }
    gradients.sum(tables, deterministic);
  });
  return {sorted_rows, out};
}

void pool_backward_at(const Tensor& out, const std::vector<int64_t>& row_strides,
                      const Tensors& grads, const std::vector<int64_t>& dims, const Tensor& index,
                      const Tensor& rows, const Tensor& counts, const Tensor& bags,
                      const Tensor& features, const Tensors& sample_weights,
                      const std::optional<Tensor>& key_starts,
                      [[maybe_unused]] bool deterministic) {
  const char* op = "group_embedding_bag_backward_at_";
  check(!grads.empty() || dims.empty(), op, ": grads must not be empty");
  // The place of a sum does not depend on their number, so nothing waits for a count on a device.
  const Gradients gradients(op, grads, dims, index, rows, counts, bags, features, sample_weights,
                            key_starts, 1, !kOnDevice);
  check_list(row_strides.size(), dims.size(), op, "row_strides");
  for (size_t t = 0; t < row_strides.size(); ++t) {
    check(row_strides[t] >= 1 && row_strides[t] <= kMostElements, op, ": row_strides[", t,
          "] must be in [1, 2^44], got ", row_strides[t]);
  }
  if (grads.empty()) return;
  check_dtype(out, dtype_of(grads[0]), op, "out");
  check_mutable(out, op, "out");
  check(same_device(out, index), op, ": out is not on the device of index");
  Overlaps overlaps(op);
  overlaps.written("out", out);
  overlaps.read("grads", gradients.grads);
  overlaps.read("index", index);
  overlaps.read("rows", rows);
  overlaps.read("counts", counts);
  overlaps.read("bags", bags);
  overlaps.read("sample_weights", sample_weights);
  overlaps.read("key_starts", key_starts);
  overlaps.check();
  dispatch_rows(grads[0], op, "grads", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::vector<FeatureBags<T>> features_of =
        gradients.arguments.bags_of<T>(gradients.grads, false);
    const std::vector<SummedTable<T>> tables = gradients.tables<T>(features_of, nullptr, nullptr);
    const SumRoom<T> room{mutable_data<T>(out), out.numel(), row_strides.data()};
    if constexpr (kOnDevice) {
      gradients.sum_at(tables, room);
    } else {
      gradients.check_rows(
          tables, [&](size_t t) { return room.num_rows(static_cast<int64_t>(t), dims[t]); });
      auto write = [&](int64_t t, const int64_t* own_rows, const T* grad,
                       const ParallelFor& parallel_for) {
        const int64_t dim = dims[t], stride = row_strides[t];
        parallel_for(0, gradients.counts[t], 1024, [=](int64_t begin, int64_t end) {
          for (int64_t j = begin; j < end; ++j) {
            std::copy_n(grad + j * dim, dim, room.out + own_rows[j] * stride);
          }
        });
      };
      const GradientTaker<T> taker(write);
      gradients.sum(tables, true, &taker);
    }
  });
}

void pool_update(const Tensors& grads, const Tensor& index, const Tensor& rows,
                 const Tensor& counts, const Tensor& bags, const Tensor& features,
                 const Tensors& sample_weights, const std::optional<Tensor>& key_starts,
                 const Tensors& weights, const Tensors& states, const Tensors& row_steps,
                 const Tensors& steps, const std::string& rule, const std::vector<double>& settings,
                 int64_t divisor, bool per_row, std::optional<int64_t> rounding_seed, bool counted,
                 [[maybe_unused]] bool deterministic) {
  const char* op = "group_embedding_bag_update_";
  const TableLists lists{op, weights, states, row_steps, steps};
  lists.check_sizes();
  check_list_device(index, weights, op, "weights");
  std::vector<int64_t> dims;
  for (size_t t = 0; t < weights.size(); ++t) {
    check_dim(weights[t], 2, op, Item{"weights", t});
    dims.push_back(weights[t].size(1));
  }
  const Gradients gradients(op, grads, dims, index, rows, counts, bags, features, sample_weights,
                            key_starts, divisor, !kOnDevice);
  if (!grads.empty()) check_dtype(grads[0], dtype_of(weights[0]), op, "grads");
  const StepNumber number{counted, per_row};
  const Rounding rounding = rounding_of(rounding_seed);
  dispatch_step(lists, rule, settings, per_row, [&](auto tag, const auto& chosen) {
    using T = typename decltype(tag)::type;
    std::vector<SteppedTable<T>> tables(lists.size());
    lists.for_each([&](size_t t, const char* op_of) {
      tables[t] = lists.read_table<T>(t, number, std::decay_t<decltype(chosen)>::kRowWise, op_of);
    });
    Overlaps overlaps(op);
    overlaps.read("grads", gradients.grads);
    overlaps.read("index", index);
    overlaps.read("rows", rows);
    overlaps.read("counts", counts);
    overlaps.read("bags", bags);
    overlaps.read("features", features);
    overlaps.read("sample_weights", sample_weights);
    overlaps.read("key_starts", key_starts);
    for (size_t t = 0; t < lists.size(); ++t) lists.add_table(overlaps, t, counted);
    overlaps.check();

    const std::vector<FeatureBags<T>> features_of =
        gradients.arguments.bags_of<T>(gradients.grads, false);
    if constexpr (kOnDevice) {
      gradients.update_on_device(features_of, tables, chosen, number, rounding);
    } else {
      const std::vector<SummedTable<T>> summed = gradients.tables<T>(features_of, nullptr, nullptr);
      gradients.check_rows(summed, [&](size_t t) { return tables[t].table.num_rows; });
      auto update = [&](int64_t t, const int64_t* own_rows, const T* grad,
                        const ParallelFor& parallel_for) {
        const RowGradients<T> of_rows{own_rows, grad, gradients.counts[t]};
        cpu::update_rows(&tables[t], &of_rows, 1, chosen, number, rounding, parallel_for);
      };
      const GradientTaker<T> taker(update);
      gradients.sum(summed, true, &taker);
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
