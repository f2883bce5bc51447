#include "sparsekit/group_embedding_bag.h"

#include "group_bags.h"
#include "overlap.h"

namespace sparsekit::ops {
namespace {

using Tensors = std::vector<Tensor>;

void check_same_dtype(const Tensors& tensors, const char* op, const char* name) {
  for (size_t i = 1; i < tensors.size(); ++i) {
    check(tensors[i].scalar_type() == tensors[0].scalar_type(), op, ": ", name, "[", i,
          "] must have the dtype of ", name, "[0], got ",
          torch::headeronly::toString(tensors[i].scalar_type()));
  }
}

void pool(Tensors outs, Tensors weights, Tensor index, std::optional<Tensor> rows,
          std::optional<Tensor> counts, Tensor bags, Tensor features, Tensors sample_weights,
          std::optional<Tensor> first_keys, Tensors keys, Tensors seeds,
          std::optional<Tensor> initializers) {
  const char* op = "group_embedding_bag_";
  const size_t num_tables = weights.size();
  std::vector<int64_t> dims;
  for (size_t t = 0; t < num_tables; ++t) {
    if (weights[t].dim() != 2) check_dim(weights[t], 2, op, Item{"weights", t});
    dims.push_back(weights[t].size(1));
    check_elements({weights[t].size(0), dims[t]}, op, "weights");
    check_row_size(dims[t], op, "weights");
    weights[t] = packed(weights[t]);
  }
  check_same_dtype(weights, op, "weights");
  check_list_device(index, weights, op, "weights");
  const GroupArguments arguments(op, outs, "outs", index, rows, counts, bags, features,
                                 sample_weights, first_keys, keys,
                                 static_cast<int64_t>(num_tables));
  for (size_t o = 0; o < outs.size(); ++o) {
    if (!outs[o].is_contiguous()) check_mutable(outs[o], op, Item{"outs", o});
    check(weights.empty() || outs[o].scalar_type() == weights[0].scalar_type(), op, ": outs[", o,
          "] must have the dtype of weights, got ",
          torch::headeronly::toString(outs[o].scalar_type()));
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
  overlaps.read("first_keys", first_keys);
  overlaps.read("keys", keys);
  overlaps.read("features", features);
  overlaps.read("seeds", seeds);
  overlaps.read("initializers", initializers);
  overlaps.check();
  if (weights.empty()) return;
  const Engine engine(index);
  dispatch_rows(weights[0], op, "weights", [&](auto tag) {
    using T = typename decltype(tag)::type;
    std::vector<PooledTable<T>> tables;
    tables.reserve(num_tables);
    for (size_t t = 0; t < num_tables; ++t) {
      PooledTable<T> table{data<T>(weights[t]), weights[t].size(0), dims[t], nullptr, 0, nullptr,
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
      const Workspace memory(cuda::group_embedding_bag_workspace_bytes(tables.data(), asked.data(),
                                                                       count, arguments.entries),
                             index);
      cuda::group_embedding_bag(tables.data(), asked.data(), count, arguments.entries,
                                data<int32_t>(arguments.index),
                                arguments.rows ? data<int32_t>(*arguments.rows) : nullptr,
                                arguments.counts ? int64_data(*arguments.counts) : nullptr,
                                {engine.bad(Complaint::kBagOffset), engine.bad(Complaint::kBagRow)},
                                engine.bad(Complaint::kGroupIndex), memory.data(), engine.stream());
      arguments.check_found(engine);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const int64_t units_bytes = (count + 8) / 8 * 64;
      int64_t scratch_bytes = 0;
      if (!initial.empty()) {
        scratch_bytes = *std::max_element(dims.begin(), dims.end()) *
                        static_cast<int64_t>(sizeof(T)) * parallel_for.num_threads();
      }
      const Workspace memory(units_bytes + scratch_bytes, index);
      auto* units = static_cast<char*>(memory.data());
      auto* scratch = initial.empty() ? nullptr : reinterpret_cast<T*>(units + units_bytes);
      const int64_t bad = cpu::group_embedding_bag<T>(
          tables.data(), asked.data(), count, {nullptr, data<int32_t>(arguments.index)},
          reinterpret_cast<int64_t*>(units), scratch, parallel_for);
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

std::tuple<Tensor, Tensor> pool_backward(Tensors grads, std::vector<int64_t> dims, Tensor index,
                                         std::optional<Tensor> rows, Tensor counts, Tensor bags,
                                         Tensor features, Tensors sample_weights,
                                         std::optional<Tensor> first_keys, int64_t divisor,
                                         [[maybe_unused]] bool deterministic) {
  const char* op = "group_embedding_bag_backward";
  const size_t num_tables = dims.size();
  check_same_dtype(grads, op, "grads");
  for (Tensor& grad : grads) grad = packed(grad);
  const GroupArguments arguments(op, grads, "grads", index, rows, counts, bags, features,
                                 sample_weights, first_keys, {}, static_cast<int64_t>(num_tables));
  for (size_t t = 0; t < num_tables; ++t) {
    check(dims[t] >= 0 && dims[t] <= kMostElements, op, ": dims[", t, "] is ", dims[t]);
    check_row_size(dims[t], op, "a gradient");
  }
  arguments.check_placements(grads, "grads", dims);
  check(divisor >= 1, op, ": divisor must be at least 1, got ", divisor);
  check(!grads.empty() || num_tables == 0, op, ": grads must not be empty");
  const Engine engine(index);
  std::vector<int64_t> host_counts(num_tables);
  engine.read(int64_data(*arguments.counts), static_cast<int64_t>(num_tables), host_counts.data());
  int64_t total = 0, elements = 0;
  for (size_t t = 0; t < num_tables; ++t) {
    check(host_counts[t] >= 0, op, ": counts[", t, "] is ", host_counts[t]);
    check_elements({host_counts[t], dims[t]}, op, "a gradient");
    total += host_counts[t];
    elements += host_counts[t] * dims[t];
    check_elements({total, 1}, op, "all gradients");
    check_elements({elements, 1}, op, "all gradients");
  }
  Tensor sorted_rows = new_output(index, {arguments.rows ? total : 0}, ScalarType::Long);
  const Tensor& like = grads.empty() ? index : grads[0];
  Tensor out = new_output(like, {elements});
  if (grads.empty()) return {sorted_rows, out};
  dispatch_rows(grads[0], op, "grads", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const std::vector<FeatureBags<T>> asked = arguments.bags_of<T>(grads, false);
    std::vector<SummedTable<T>> tables;
    tables.reserve(num_tables);
    int64_t row = 0;
    T* grad = mutable_data<T>(out);
    for (size_t t = 0; t < num_tables; ++t) {
      const auto [first_entry, n] = arguments.entries_of(t);
      SummedTable<T> table{
          asked.data() + arguments.group.table_features[t],
          arguments.group.table_features[t + 1] - arguments.group.table_features[t],
          first_entry,
          n,
          host_counts[t],
          dims[t],
          grad,
          nullptr,
          nullptr};
      if (arguments.rows.has_value()) {
        table.rows = data<int32_t>(*arguments.rows) + first_entry;
        table.sorted_rows = mutable_data<int64_t>(sorted_rows) + row;
      }
      tables.push_back(table);
      row += table.num_rows;
      grad += table.num_rows * table.dim;
    }
    if constexpr (kOnDevice) {
      const auto count = static_cast<int64_t>(num_tables);
      const Workspace memory(cuda::group_embedding_bag_backward_workspace_bytes(
                                 tables.data(), count, arguments.entries),
                             index);
      cuda::group_embedding_bag_backward(
          tables.data(), count, arguments.entries, data<int32_t>(arguments.index),
          arguments.rows ? data<int32_t>(*arguments.rows) : nullptr, int64_data(*arguments.counts),
          divisor, deterministic,
          {engine.bad(Complaint::kBagOffset), engine.bad(Complaint::kBagRow)},
          engine.bad(Complaint::kGroupIndex), memory.data(), engine.stream());
      arguments.check_found(engine);
    } else {
      for (size_t t = 0; t < num_tables; ++t) {
        for (int64_t j = 0; tables[t].rows != nullptr && j < tables[t].num_rows; ++j) {
          if (tables[t].rows[j] >= 0) continue;
          index_error(op, ": rows[", tables[t].first_entry + j, "] is ", tables[t].rows[j],
                      ", which is no row");
        }
      }
      std::vector<int32_t> order(num_tables);
      const ParallelFor parallel_for = torch_parallel_for();
      const auto count = static_cast<int64_t>(num_tables);
      const Workspace memory(cpu::group_embedding_bag_backward_workspace_bytes(
                                 tables.data(), count, order.data(), parallel_for),
                             index);
      const int64_t bad = cpu::group_embedding_bag_backward(
          tables.data(), count, {nullptr, data<int32_t>(arguments.index)}, divisor, order.data(),
          memory.data(), parallel_for);
      if (bad < 0) return;
      const int64_t t = arguments.table_of(bad);
      arguments.bad_number("index", bad, data<int32_t>(arguments.index)[bad], t, host_counts[t],
                           "distinct keys");
    }
  });
  return {sorted_rows, out};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_embedding_bag_", TORCH_BOX(&sparsekit::ops::pool));
  m.impl("group_embedding_bag_backward", TORCH_BOX(&sparsekit::ops::pool_backward));
}
