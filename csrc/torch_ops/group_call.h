// Begins a call of an op that takes keys of many tables, on either engine.
#pragma once

#include <utility>
#include <vector>

#include "group.h"

namespace sparsekit::ops {

// Makes the results `bags` and `key_starts` of a call, uninitialised.
inline std::pair<Tensor, Tensor> new_bags(const GroupInput& input, const Tensor& like) {
  const auto count = static_cast<int64_t>(input.features.size());
  return {new_output(like, {input.source_bags + 1}, ScalarType::Int),
          new_output(like, {count}, ScalarType::Long)};
}

// A call's arguments and memory on a device.
struct DeviceCall {
  cuda::GroupCall call;
  cuda::GroupBags bags;
  Workspace memory;

  // `tables` has the fields that the input does not determine; workspace_bytes(call) is the memory
  // needed.
  template <class WorkspaceBytes>
  DeviceCall(const GroupInput& input, const cuda::GroupCall& tables,
             const WorkspaceBytes& workspace_bytes, const std::pair<Tensor, Tensor>& results,
             const Tensor& like)
      : call(with_input(tables, input)),
        bags{mutable_data<int32_t>(results.first), mutable_data<int64_t>(results.second)},
        memory(workspace_bytes(call), like) {}

  // Fills the bags and, with checks on, raises errors of the input.
  void begin(const GroupInput& input, const DeviceContext& context) const {
    cuda::begin_group(
        call, bags,
        {context.error_word(DeviceError::kGroupOffset), context.error_word(DeviceError::kGroupBag),
         context.error_word(DeviceError::kGroupKey)},
        memory.data(), context.stream());
    input.raise_found(context);
  }

 private:
  static cuda::GroupCall with_input(cuda::GroupCall call, const GroupInput& input) {
    call.sources = input.sources.data();
    call.num_sources = static_cast<int64_t>(input.sources.size());
    call.features = input.features.data();
    call.num_features = static_cast<int64_t>(input.features.size());
    call.num_bags = input.num_bags;
    call.entries = input.entries;
    return call;
  }
};

// Does the same on the CPU, and fills in the entries of each table. Table is derived from
// AskedTable.
template <class Table>
void begin_on_cpu(GroupInput& input, std::vector<Table>& tables,
                  const std::pair<Tensor, Tensor>& results, const DeviceContext& context) {
  input.check_offsets(context);
  int64_t entry = 0;
  for (Table& table : tables) {
    table.first_entry = entry;
    for (int64_t f = 0; f < table.features; ++f) {
      const Feature& feature = input.features[table.first_feature + f];
      entry += feature.n;
      if (table.end < 0) continue;
      const int64_t bad =
          cpu::check_keys(input.sources[feature.source], feature.key_start,
                          feature.key_start + feature.n, table.end, torch_parallel_for());
      if (bad >= 0) input.wrong_key(feature.source, bad, context);
    }
    table.n = entry - table.first_entry;
  }
  cpu::write_bags(input.sources.data(), input.features.data(),
                  static_cast<int64_t>(input.features.size()), mutable_data<int32_t>(results.first),
                  mutable_data<int64_t>(results.second), torch_parallel_for());
}

}  // namespace sparsekit::ops
