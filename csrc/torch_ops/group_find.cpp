#include "sparsekit/group_find.h"

#include "exclusive.h"
#include "group_call.h"
#include "hash_table.h"
#include "overlap.h"
#include "process_seed.h"

namespace sparsekit::ops {
namespace {

using Tensors = std::vector<Tensor>;

// The tables of a call, checked but for what only their values say.
struct GroupTables {
  std::vector<GroupTable> tables;
  std::vector<int64_t> hash_tables;  // of each table, or -1

  GroupTables(const char* op, const Tensors& buckets, const Tensors& hash_seeds,
              const Tensor& descriptors, const GroupInput& input) {
    check_list(hash_seeds.size(), buckets.size(), op, "hash_seeds");
    for (size_t h = 0; h < buckets.size(); ++h) {
      check_buckets(buckets[h], op, Item{"buckets", h});
      check_word(hash_seeds[h], op, Item{"hash_seeds", h});
    }
    tables.reserve(input.num_tables());
    hash_tables.reserve(input.num_tables());
    const int64_t* columns = int64_data(descriptors);
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    for (size_t t = 0; t < input.num_tables(); ++t, columns += kTableColumns) {
      const int64_t h = columns[0], capacity = columns[1], world_size = columns[2];
      check(h >= -1 && h < static_cast<int64_t>(buckets.size()), op, ": tables[", t,
            "] has hash table ", h, " of ", buckets.size());
      int64_t most = kMost;
      if (h >= 0) most = std::min(kMost, buckets[h].size(0) * kSlotsPerBucket);
      check(capacity >= (h >= 0 ? 1 : 0) && capacity <= most, op, ": capacity of tables[", t,
            "] is ", capacity, ", but must be in [", h >= 0 ? 1 : 0, ", ", most, "]");
      check(world_size >= 1 && world_size <= kMost, op, ": world_size of tables[", t, "] is ",
            world_size, ", but must be in [1, ", kMost, "]");
      GroupTable table{};
      if (h >= 0) {
        table.buckets = mutable_data<Bucket>(buckets[h]);
        table.num_buckets = buckets[h].size(0);
        table.device_hash_seed = int64_data(hash_seeds[h]);
        if constexpr (!kOnDevice) table.hash_seed = *table.device_hash_seed;
      }
      table.capacity = capacity;
      table.world_size = world_size;
      table.end = h >= 0 ? -1 : capacity * world_size;
      table.first_feature = input.table_features[t];
      table.features = input.table_features[t + 1] - table.first_feature;
      tables.push_back(table);
      hash_tables.push_back(h);
    }
  }
};

cuda::GroupCall device_call(const GroupTables& group, const NewRows* new_rows) {
  cuda::GroupCall call{};
  call.tables = group.tables.data();
  call.num_tables = static_cast<int64_t>(group.tables.size());
  call.new_rows = new_rows;
  return call;
}

std::tuple<Tensor, Tensor, Tensor> find(const Tensors& buckets, const Tensors& hash_seeds,
                                        const Tensor& tables_in, const Tensors& keys,
                                        const Tensors& offsets, const Tensor& features) {
  const char* op = "group_find";
  const Tensor tables = host_matrix(tables_in, ScalarType::Long, kTableColumns, op, "tables");
  GroupInput input(op, keys, offsets, features, tables.size(0));
  const Tensor& like = first_of(keys, buckets, features);
  check_list_device(like, keys, op, "keys");
  check_list_device(like, offsets, op, "offsets");
  check_list_device(like, buckets, op, "buckets");
  check_list_device(like, hash_seeds, op, "hash_seeds");
  GroupTables group(op, buckets, hash_seeds, tables, input);
  const DeviceContext context(like);
  const auto results = new_bags(input, like);
  Tensor rows = new_output(like, {input.entries}, ScalarType::Int);
  if constexpr (kOnDevice) {
    const DeviceCall device(input, device_call(group, nullptr), cuda::group_find_workspace_bytes,
                            results, like);
    device.begin(input, context);
    cuda::group_find(device.call, device.bags, mutable_data<int32_t>(rows), device.memory.data(),
                     context.stream());
  } else {
    begin_on_cpu(input, group.tables, results, context);
    const auto count = static_cast<int64_t>(input.features.size());
    const Workspace memory((count + 1) * static_cast<int64_t>(sizeof(int64_t)), like);
    cpu::group_find(group.tables.data(), input.sources.data(), input.features.data(), count,
                    mutable_data<int32_t>(rows), static_cast<int64_t*>(memory.data()),
                    torch_parallel_for());
  }
  return {rows, results.first, results.second};
}

// Weights, seeds and initializers of the tables, for rows that are new.
std::vector<NewRows> new_rows_of(const char* op, const Tensors& weights, const Tensors& seeds,
                                 const Tensor& initializers, const GroupTables& group) {
  const size_t count = group.tables.size();
  check_list(weights.size(), count, op, "weights");
  const std::vector<Initializer> initial = initializers_of(initializers, seeds, count, op);
  std::vector<NewRows> new_rows;
  new_rows.reserve(count);
  const ScalarType dtype = weights.empty() ? ScalarType::Float : dtype_of(weights[0]);
  for (size_t t = 0; t < count; ++t) {
    const Tensor& weight = weights[t];
    if (weight.dim() != 2 || !weight.is_contiguous()) {
      check_dim(weight, 2, op, Item{"weights", t});
      check_mutable(weight, op, Item{"weights", t});
    }
    const int64_t num_rows = weight.size(0), dim = weight.size(1);
    check_elements({num_rows, dim}, op, "weights");
    const ScalarType type = dtype_of(weight);
    check(type == dtype, op, ": weights[", t, "] must have the dtype of the others, got ",
          torch::headeronly::toString(type));
    check(num_rows >= group.tables[t].capacity, op, ": weights[", t, "] has ", num_rows,
          " rows, but capacity of tables[", t, "] is ", group.tables[t].capacity);
    check_row_size(dim, op, "weights");
    NewRows rows{weight.mutable_data_ptr(), dim, initial[t], int64_data(seeds[t])};
    if constexpr (!kOnDevice) {
      rows.initializer.seed = static_cast<uint64_t>(*rows.device_seed);
    }
    new_rows.push_back(rows);
  }
  return new_rows;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> find_or_insert(
    const Tensors& buckets, const Tensors& hash_seeds, const Tensors& sizes, const Tensors& weights,
    const Tensors& seeds, const Tensor& tables_in, const Tensor& initializers, const Tensors& keys,
    const Tensors& offsets, const Tensor& features) {
  const char* op = "group_find_or_insert_";
  const Tensor tables = host_matrix(tables_in, ScalarType::Long, kTableColumns, op, "tables");
  GroupInput input(op, keys, offsets, features, tables.size(0));
  const Tensor& like = first_of(keys, weights, features);
  const std::pair<const char*, const Tensors*> lists[] = {
      {"buckets", &buckets}, {"hash_seeds", &hash_seeds}, {"sizes", &sizes},
      {"weights", &weights}, {"seeds", &seeds},           {"keys", &keys},
      {"offsets", &offsets}};
  for (const auto& [name, tensors] : lists) check_list_device(like, *tensors, op, name);
  Overlaps overlaps(op);
  overlaps.written("buckets", buckets);
  overlaps.written("sizes", sizes);
  overlaps.written("weights", weights);
  overlaps.read("keys", keys);
  if constexpr (kOnDevice) {  // on the CPU they have been read before anything is written
    overlaps.read("hash_seeds", hash_seeds);
    overlaps.read("seeds", seeds);
    overlaps.read("offsets", offsets);
  }
  GroupTables group(op, buckets, hash_seeds, tables, input);
  check_list(sizes.size(), buckets.size(), op, "sizes");
  std::vector<bool> taken(buckets.size());
  for (size_t h = 0; h < sizes.size(); ++h) check_word(sizes[h], op, Item{"sizes", h});
  for (size_t t = 0; t < group.tables.size(); ++t) {
    const int64_t h = group.hash_tables[t];
    if (h < 0) continue;
    check(!taken[h], op, ": tables[", t, "] has hash table ", h, ", as has one before it");
    taken[h] = true;
    group.tables[t].size = mutable_data<int64_t>(sizes[h]);
  }
  const std::vector<NewRows> new_rows = new_rows_of(op, weights, seeds, initializers, group);
  overlaps.check();
  const Exclusive alone(buckets, op);
  const DeviceContext context(like);
  const auto count = static_cast<int64_t>(group.tables.size());
  const auto results = new_bags(input, like);
  Tensor rows = new_output(like, {input.entries}, ScalarType::Int);
  Tensor inverse = new_output(like, {input.entries}, ScalarType::Int);
  Tensor counts = new_output(like, {count}, ScalarType::Long);
  std::vector<int64_t> refused(group.tables.size());
  const auto run = [&](auto tag) {
    using T = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const DeviceCall device(input, device_call(group, new_rows.data()),
                              cuda::group_find_workspace_bytes, results, like);
      device.begin(input, context);
      const Tensor status = new_output(like, {2 * count}, ScalarType::Long);
      cuda::group_find_or_insert<T>(device.call, device.bags, process_seed(),
                                    mutable_data<int32_t>(rows), mutable_data<int32_t>(inverse),
                                    mutable_data<int64_t>(counts), mutable_data<int64_t>(status),
                                    device.memory.data(), context.stream());
      std::vector<int64_t> host_status(2 * count);
      context.read(int64_data(status), 2 * count, host_status.data());
      for (int64_t t = 0; t < count; ++t) refused[t] = host_status[2 * t + 1];
    } else {
      begin_on_cpu(input, group.tables, results, context);
      for (const GroupTable& table : group.tables) {
        if (table.buckets != nullptr) {
          check_size_value(*table.size, table.num_buckets, op, "a size");
        }
      }
      std::vector<int32_t> order(group.tables.size());
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(cpu::group_find_or_insert_workspace_bytes(group.tables.data(), count,
                                                                       order.data(), parallel_for),
                             like);
      cpu::group_find_or_insert<T>(
          group.tables.data(), count, new_rows.data(), input.sources.data(), input.features.data(),
          process_seed(), mutable_data<int32_t>(rows), mutable_data<int32_t>(inverse),
          mutable_data<int64_t>(counts), refused.data(), order.data(), memory.data(), parallel_for);
    }
  };
  if (weights.empty()) {
    run(TypeTag<float>{});
  } else {
    dispatch_rows(weights[0], op, "weights", run);
  }
  for (int64_t t = 0; t < count; ++t) {
    check(refused[t] >= 0, op, ": the hash table of table ", t,
          " is damaged: no slot is free, or a row is beyond its capacity");
  }
  for (int64_t t = 0; t < count; ++t) {
    if (refused[t] == 0) continue;
    const Tensor& size = sizes[group.hash_tables[t]];
    throw std::runtime_error(message(op, ": table ", t, " is full: ", context.value(size, 0),
                                     " of its ", group.tables[t].capacity, " rows are in use, and ",
                                     refused[t],
                                     " of the keys are new; none of them has been inserted"));
  }
  return {rows, inverse, counts, results.first, results.second};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_find", TORCH_BOX(&sparsekit::ops::find));
  m.impl("group_find_or_insert_", TORCH_BOX(&sparsekit::ops::find_or_insert));
}
