// Computes the gradients of the rows of many tables, for ops that return them, write them to an
// argument, or use them in an optimizer step.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "group_bags.h"
#include "row_table.h"

namespace sparsekit::ops {

// Checked inputs for computing the gradients of all tables.
class Gradients {
 public:
  Tensors grads;  // gradients of outputs
  const GroupArguments arguments;
  const DeviceContext context;
  std::vector<int64_t> counts;     // number of rows of each table, or an upper bound
  int64_t rows = 0, elements = 0;  // totals over all tables, if counts are known

  Gradients(Arguments& given, const Tensors& grads_in, ScalarType dtype,
            const std::vector<int64_t>& dims, const GivenEntries& entries, int64_t divisor,
            bool knows_counts)
      : grads(add(given, grads_in, dtype)),
        arguments(given, entries, {}, dims.size()),
        context(entries.index),
        counts(dims.size()),
        given_(given),
        dims_(dims),
        divisor_(divisor) {
    for (size_t t = 0; t < dims.size(); ++t) {
      given.check(dims[t] >= 0 && dims[t] <= kMostElements, "dims[", t, "] is ", dims[t]);
      given.check_row_size("a gradient", dims[t]);
    }
    arguments.check_placements(grads, "grads", dims);
    grads = arguments.readable(std::move(grads), dims);
    given.check(divisor >= 1, "divisor must be at least 1, got ", divisor);
    if (knows_counts) {
      read_counts();
    } else {
      bound_counts();
    }
  }

  // Returns the tables. Their gradients will be written to grad [elements], and their row indices
  // to sorted_rows [rows]. If a taker receives the gradients, both pointers may be null.
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
      if (arguments.rows_data() != nullptr) {
        table.rows = arguments.rows_data() + first_entry;
        table.sorted_rows = sorted_rows;
      }
      tables.push_back(table);
      if (sorted_rows != nullptr) sorted_rows += table.num_rows;
    }
    return tables;
  }

  // Writes zeros to the gaps between the gradients of different tables.
  template <class T>
  void clear_gaps(T* grad) const {
    for (size_t t = 1; t < counts.size(); ++t) {
      std::fill(grad + begins_[t - 1] + counts[t - 1] * dims_[t - 1], grad + begins_[t], T{});
    }
  }

  // On the CPU: throws an error unless all rows of each table t are in [0, num_rows(t)).
  template <class T, class NumRows>
  void check_rows(const std::vector<SummedTable<T>>& tables, const NumRows& num_rows) const {
    for (size_t t = 0; t < tables.size(); ++t) {
      for (int64_t j = 0; tables[t].rows != nullptr && j < tables[t].num_rows; ++j) {
        const int64_t row = tables[t].rows[j];
        if (row >= 0 && row < num_rows(t)) continue;
        given_.index_error("rows[", tables[t].first_entry + j, "] is ", row,
                           ", which is no row of table ", t);
      }
    }
  }

  // Computes the gradient of each row. Only the CPU engine supports a taker.
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

  // On a device: writes the gradient of each row to `room`. With checks on, throws the error found
  // by the device, if there is one.
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
    given_.index_error("rows[", bad_row, "] is ", context.value(*arguments.rows, bad_row),
                       ", which is no row of its table");
  }

  // On a device: takes an optimizer step without reading back the number of rows. With checks on,
  // throws the error found by the device, if there is one.
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
        context.keeper(), memory.data(), context.stream());
    const BadRow bad = found_bad_row(context, tables.size());
    if (bad.table < 0) return;
    int64_t first_bag = 0;
    for (const Feature& feature : arguments.group.features) {
      if (feature.table < bad.table) first_bag += feature.bags;
    }
    const int64_t first = context.value(arguments.bags, first_bag);
    const auto at = std::clamp<int64_t>(first + bad.position, 0, arguments.entries - 1);
    given_.index_error("one of rows is ", context.value(*arguments.rows, at),
                       ", which is no row of table ", bad.table);
  }

 private:
  static const Tensors& add(Arguments& given, const Tensors& grads, ScalarType dtype) {
    given.read_each("grads", grads, dtype);
    return grads;
  }

  int64_t num_tables() const { return static_cast<int64_t>(dims_.size()); }

  void read_counts() {
    context.read(int64_data(*arguments.counts), num_tables(), counts.data());
    for (size_t t = 0; t < dims_.size(); ++t) {
      given_.check(counts[t] >= 0, "counts[", t, "] is ", counts[t]);
      given_.check_elements("a gradient", {counts[t], dims_[t]});
      rows += counts[t];
      elements = (elements + kPartElements - 1) / kPartElements * kPartElements;
      begins_.push_back(elements);
      elements += counts[t] * dims_[t];
      given_.check_elements("all gradients", {rows, 1});
      given_.check_elements("all gradients", {elements, 1});
    }
    given_.check_sort_sizes(arguments.rows ? rows : 0, "number of all rows", rows + num_tables());
  }

  // Sets `counts` to upper bounds: a table has at most as many rows as entries, and a bag has at
  // most max_nnz entries.
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
      given_.check_elements("a gradient", {counts[t], dims_[t]});
      longest = std::max(longest, dims_[t]);
    }
    given_.check_elements("all gradients", {entries, longest});
  }

  template <class T>
  cuda::GroupSums<T> on_device(const std::vector<SummedTable<T>>& tables) const {
    return {tables.data(),
            num_tables(),
            arguments.entries,
            data<int32_t>(arguments.bags),
            data<int32_t>(arguments.index),
            arguments.rows_data(),
            int64_data(*arguments.counts),
            divisor_};
  }

  const Arguments& given_;
  const std::vector<int64_t>& dims_;
  int64_t divisor_;
  std::vector<int64_t> begins_;  // start of each table's gradient, in elements
};

}  // namespace sparsekit::ops
