#include "sparsekit/group_find.h"

#include "group.h"
#include "hash_table.h"

namespace sparsekit::ops {
namespace {

// The tables of a call. Their arguments have been checked, except for the contents of tensors.
struct GroupTables {
  std::vector<GroupTable> tables;
  std::vector<int64_t> hash_tables;  // for each table, the index of its hash table, or -1

  GroupTables(Arguments& given, const Views& buckets, const Views& hash_seeds,
              const Descriptor<TableRow>& rows, const GroupInput& input) {
    given.check_list("hash_seeds", hash_seeds.size(), buckets.size());
    std::vector<int64_t> num_buckets;
    num_buckets.reserve(buckets.size());
    for (size_t h = 0; h < buckets.size(); ++h) {
      num_buckets.push_back(read_buckets(given, {"buckets", h}, buckets[h]));
      given.read_ahead({"hash_seeds", h}, hash_seeds[h], ScalarType::Long, 1);
      given.check_one({"hash_seeds", h}, hash_seeds[h]);
    }
    tables.reserve(rows.size());
    hash_tables.reserve(rows.size());
    for (size_t t = 0; t < rows.size(); ++t) {
      const auto& [h, capacity, world_size] = rows[t];
      given.check(h >= -1 && h < static_cast<int64_t>(buckets.size()), "tables[", t,
                  "] has hash table ", h, " of ", buckets.size());
      const int64_t least = h >= 0 ? 1 : 0;
      const int64_t most =
          h >= 0 ? std::min(kMostNumbered, num_buckets[h] * kSlotsPerBucket) : kMostNumbered;
      given.check(capacity >= least && capacity <= most, "capacity of tables[", t, "] is ",
                  capacity, ", but must be in [", least, ", ", most, "]");
      given.check(world_size >= 1 && world_size <= kMostNumbered, "world_size of tables[", t,
                  "] is ", world_size, ", but must be in [1, ", kMostNumbered, "]");
      GroupTable table{};
      if (h >= 0) {
        table.buckets = mutable_data<Bucket>(buckets[h]);
        table.num_buckets = num_buckets[h];
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

// Checks the argument `report`, which the host reads later, without waiting. It begins with the
// device's error words. The CPU engine has no error words and ignores this argument.
void check_report(Arguments& given, const std::optional<Tensor>& report, int64_t num_words) {
  if (!report.has_value()) return;
  given.written("report", *report, ScalarType::Long, 1);
  given.check_size("report", *report, 0, kNumErrors + num_words);
}

// Returns the destination of the error words. Without a report, as in a graph whose replays send no
// report, the words stay on the device.
cuda::ErrorReport errors_to(const std::optional<Tensor>& report, const DeviceContext& context) {
  if (!report.has_value()) return {};
  return {context.error_words(), mutable_data<int64_t>(*report), kNumErrors};
}

std::tuple<Tensor, Tensor, Tensor> find(const Tensors& buckets_in, const Tensors& hash_seeds_in,
                                        const Tensor& tables, const Tensors& keys,
                                        const Tensors& offsets, const Tensor& features,
                                        const std::optional<Tensor>& report) {
  const Views buckets(buckets_in), hash_seeds(hash_seeds_in);
  Arguments given("group_find", report ? Arguments::kWrites : Arguments::kReads);
  const Descriptor<TableRow> table_rows(given, "tables", tables);
  GroupInput input(given, keys, offsets, features, table_rows.size());
  GroupTables group(given, buckets, hash_seeds, table_rows, input);
  check_report(given, report, 0);
  if (report) given.check_apart();
  const Tensor& like = given.first_or(features);
  const DeviceContext context(like);
  const auto results = new_bags(input, like);
  Tensor rows = new_output(like, {input.entries}, ScalarType::Int);
  if constexpr (kOnDevice) {
    const DeviceCall device(input, device_call(group, nullptr), cuda::group_find_workspace_bytes,
                            results, like, context);
    device.begin(input, context);
    cuda::group_find(device.call, device.bags, mutable_data<int32_t>(rows),
                     errors_to(report, context), device.memory.data(), context.stream());
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

// Returns the weight, seed and initializer for the new rows of each table.
std::vector<NewRows> new_rows_of(Arguments& given, const Views& weights, const Views& seeds,
                                 const Tensor& initializers, const GroupTables& group) {
  const size_t count = group.tables.size();
  given.check_list("weights", weights.size(), count);
  given.read_each_ahead("seeds", seeds, ScalarType::Long);
  const std::vector<Initializer> initial = initializers_of(given, initializers, seeds, count);
  std::vector<NewRows> new_rows;
  new_rows.reserve(count);
  const ScalarType dtype = weights.empty() ? kAnyDtype : dtype_of(weights[0]);
  for (size_t t = 0; t < count; ++t) {
    const Item name("weights", t);
    given.written_rows(name, weights[t], dtype);
    const auto [num_rows, dim] = given.check_dim(name, weights[t], 2);
    const int64_t stride = given.row_stride(name, weights[t]);
    given.check(num_rows >= group.tables[t].capacity, name, " has ", num_rows,
                " rows, but capacity of tables[", t, "] is ", group.tables[t].capacity);
    given.check_row_size("weights", dim);
    NewRows rows{weights[t].mutable_data_ptr(), dim, stride, initial[t], int64_data(seeds[t])};
    if constexpr (!kOnDevice) {
      rows.initializer.seed = static_cast<uint64_t>(*rows.device_seed);
    }
    new_rows.push_back(rows);
  }
  return new_rows;
}

// Checks the larger hash tables: one for each hash table, or an empty tensor where there is none.
void take_larger(Arguments& given, const Views& larger, size_t num_hash_tables,
                 GroupTables& group) {
  if (larger.empty()) return;
  given.check_list("larger", larger.size(), num_hash_tables);
  for (size_t t = 0; t < group.tables.size(); ++t) {
    const int64_t h = group.hash_tables[t];
    if (h < 0 || larger[h].numel() == 0) continue;
    GroupTable& table = group.tables[t];
    table.num_larger = read_buckets(given, {"larger", static_cast<size_t>(h)}, larger[h]);
    table.larger = mutable_data<Bucket>(larger[h]);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> find_or_insert(
    const Tensors& buckets_in, const Tensors& hash_seeds_in, const Tensors& sizes_in,
    const Tensors& weights_in, const Tensors& seeds_in, const Tensor& tables,
    const Tensor& initializers, const Tensors& keys, const Tensors& offsets, const Tensor& features,
    const Tensors& larger_in, const std::optional<Tensor>& report) {
  const Views buckets(buckets_in), hash_seeds(hash_seeds_in), larger(larger_in);
  const Views sizes(sizes_in), weights(weights_in), seeds(seeds_in);
  Arguments given("group_find_or_insert_", Arguments::kWrites);
  given.expect(2 * buckets.size() + sizes.size() + weights.size() + seeds.size() + 2 * keys.size() +
               1);
  const Descriptor<TableRow> table_rows(given, "tables", tables);
  GroupInput input(given, keys, offsets, features, table_rows.size());
  GroupTables group(given, buckets, hash_seeds, table_rows, input);
  given.check_list("sizes", sizes.size(), buckets.size());
  std::vector<bool> taken(buckets.size());
  for (size_t h = 0; h < sizes.size(); ++h) {
    const Item name("sizes", h);
    given.check_one(name, given.written(name, sizes[h], ScalarType::Long, 1));
  }
  for (size_t t = 0; t < group.tables.size(); ++t) {
    const int64_t h = group.hash_tables[t];
    if (h < 0) continue;
    given.check(!taken[h], "tables[", t, "] has hash table ", h, ", as has one before it");
    taken[h] = true;
    group.tables[t].size = mutable_data<int64_t>(sizes[h]);
  }
  take_larger(given, larger, buckets.size(), group);
  const std::vector<NewRows> new_rows = new_rows_of(given, weights, seeds, initializers, group);
  check_report(given, report, cuda::kStatusWords * static_cast<int64_t>(group.tables.size()));
  given.check_apart({buckets.id(), hash_seeds.id(), sizes.id(), weights.id(), seeds.id()});
  const Tensor& like = given.first_or(features);
  const Exclusive alone(given, buckets);
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
                              cuda::group_find_workspace_bytes, results, like, context);
      device.begin(input, context);
      const int64_t num_words = cuda::kStatusWords * count;
      const Tensor own = report ? *report : new_output(like, {num_words}, ScalarType::Long);
      int64_t* status = mutable_data<int64_t>(own) + (report ? kNumErrors : 0);
      const bool unread = !report && context.capturing();
      int64_t* word = unread ? context.error_word(DeviceError::kGroupRefused) : nullptr;
      cuda::group_find_or_insert<T>(
          device.call, device.bags, process_seed(), mutable_data<int32_t>(rows),
          mutable_data<int32_t>(inverse), mutable_data<int64_t>(counts), status, word,
          errors_to(report, context), device.memory.data(), context.stream());
      if (report || unread) return;
      std::vector<int64_t> host_status(num_words);
      context.read(status, num_words, host_status.data());
      for (int64_t t = 0; t < count; ++t) refused[t] = host_status[cuda::kStatusWords * t + 1];
    } else {
      begin_on_cpu(input, group.tables, results, context);
      for (const GroupTable& table : group.tables) {
        if (table.buckets != nullptr) {
          check_size_value(given, "a size", *table.size, table.num_buckets);
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
    given.dispatch_rows("weights", weights[0], run);
  }
  for (int64_t t = 0; t < count; ++t) {
    given.check(refused[t] >= 0, "the hash table of table ", t,
                " is damaged: no slot is free, or a row is beyond its capacity");
  }
  for (int64_t t = 0; t < count; ++t) {
    if (refused[t] == 0) continue;
    const Tensor& size = sizes[group.hash_tables[t]].tensor();
    throw std::runtime_error(message(given.op(), ": table ", t,
                                     " is full: ", context.value(size, 0), " of its ",
                                     group.tables[t].capacity, " rows are in use, and ", refused[t],
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
