#include "sparsekit/group_bucketize.h"

#include "group.h"
#include "hash_table.h"

namespace sparsekit::ops {
namespace {

// Returns each table's owner map and range of allowed keys.
std::vector<RoutedTable> routed_tables(Arguments& given, const Tensors& owners,
                                       const std::vector<int64_t>& maps,
                                       const std::vector<int64_t>& ends, int64_t world_size,
                                       const GroupInput& input) {
  for (size_t m = 0; m < owners.size(); ++m) {
    const Item name("owners", m);
    given.read(name, owners[m], ScalarType::Short, 1);
    given.check_size(name, owners[m], 0, kVirtualShards);
    given.check_contiguous(name, owners[m]);
  }
  std::vector<RoutedTable> tables(maps.size());
  for (size_t t = 0; t < maps.size(); ++t) {
    const int64_t map = maps[t];
    given.check(map >= -1 && map < static_cast<int64_t>(owners.size()), "maps[", t, "] is ", map,
                ", but owners has ", owners.size(), " element(s)");
    given.check(ends[t] >= -1, "ends[", t, "] is ", ends[t], ", but must be at least -1");
    RoutedTable& table = tables[t];
    table.owners = {map < 0 ? nullptr : data<int16_t>(owners[map]), world_size};
    table.first_feature = input.table_features[t];
    table.features = input.table_features[t + 1] - table.first_feature;
    table.end = ends[t];
  }
  return tables;
}

// Gives each table a fixed number of places for its keys, unless `max_keys` is empty. Returns the
// total number of places for one rank's keys in all tables.
int64_t fix_places(Arguments& given, const std::vector<int64_t>& max_keys, int64_t world_size,
                   std::vector<RoutedTable>& tables) {
  if (max_keys.empty()) return 0;
  given.check_list("max_keys_per_rank", max_keys.size(), tables.size());
  int64_t places = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    const int64_t most = max_keys[t];
    given.check(most >= 1 && most <= kMostNumbered / world_size - places, "max_keys_per_rank[", t,
                "] must be at least 1, and world_size times the sum of all below 2^31, got ", most);
    tables[t].max_keys = most;
    tables[t].first_place = places;
    places += most;
  }
  return places;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> bucketize(
    const Tensors& owners, const std::vector<int64_t>& maps, const std::vector<int64_t>& ends,
    const Tensors& keys, const Tensors& offsets, const Tensor& features, int64_t world_size,
    bool distinct, const std::vector<int64_t>& max_keys) {
  Arguments given("group_bucketize");
  given.check(world_size >= 1 && world_size <= kMaxWorldSize, "world_size must be in [1, ",
              kMaxWorldSize, "], got ", world_size);
  given.check_list("ends", ends.size(), maps.size());
  const auto num_tables = static_cast<int64_t>(maps.size());
  given.check(num_tables <= kMostNumbered / world_size, num_tables, " tables of ", world_size,
              " ranks; at most 2^31 - 1 of both together are supported");
  GroupInput input(given, keys, offsets, features, maps.size());
  std::vector<RoutedTable> tables = routed_tables(given, owners, maps, ends, world_size, input);
  const int64_t rank_places = fix_places(given, max_keys, world_size, tables);
  const Tensor& like = given.first_or(features);
  const DeviceContext context(like);
  const auto results = new_bags(input, like);
  const int64_t places_of_all = rank_places > 0 ? world_size * rank_places : input.entries;
  Tensor by_owner = new_output(like, {places_of_all}, ScalarType::Long);
  Tensor counts = new_output(like, {world_size, num_tables}, ScalarType::Long);
  Tensor numbers = new_output(like, {num_tables}, ScalarType::Long);
  Tensor inverse = new_output(like, {input.entries}, ScalarType::Int);
  Tensor places = new_output(like, {input.entries}, ScalarType::Int);
  const RoutedKeys to{mutable_data<int64_t>(by_owner), mutable_data<int64_t>(counts),
                      mutable_data<int64_t>(numbers),  mutable_data<int32_t>(inverse),
                      mutable_data<int32_t>(places),   rank_places};
  RouteErrors errors{-1, -1};
  if constexpr (kOnDevice) {
    cuda::GroupCall call{};
    call.routed = tables.data();
    call.num_tables = num_tables;
    const auto bytes = [=](const cuda::GroupCall& whole) {
      return cuda::group_bucketize_workspace_bytes(whole, world_size, distinct);
    };
    const DeviceCall device(input, call, bytes, results, like, context);
    device.begin(input, context);
    cuda::group_bucketize(device.call, device.bags, world_size, distinct, process_seed(), to,
                          {context.error_word(DeviceError::kGroupOwners),
                           context.error_word(DeviceError::kGroupMaxKeys)},
                          device.memory.data(), context.stream());
    errors = {context.error_position(DeviceError::kGroupOwners, num_tables),
              context.error_position(DeviceError::kGroupMaxKeys, num_tables)};
  } else {
    begin_on_cpu(input, tables, results, context);
    const ParallelFor parallel_for = torch_parallel_for();
    std::vector<int32_t> order(tables.size());
    const Workspace memory(
        cpu::group_bucketize_workspace_bytes(tables.data(), num_tables, input.entries, order.data(),
                                             parallel_for),
        like);
    errors = cpu::group_bucketize(tables.data(), num_tables, input.sources.data(),
                                  input.features.data(), world_size, distinct, process_seed(), to,
                                  order.data(), memory.data(), parallel_for);
  }
  const auto [bad, full] = errors;
  given.check(bad < 0, "owners[", bad < 0 ? 0 : maps[bad], "], of table ", bad,
              ", has an element that is not in [0, world_size = ", world_size, ")");
  given.check(full < 0, "a rank owns more keys of table ", full, " than max_keys_per_rank[", full,
              "] = ", full < 0 ? 0 : max_keys[full]);
  return {by_owner, counts, numbers, inverse, places, results.first, results.second};
}

// Arguments of group_exchange_rows. They have been checked, except for the values in `bags` and
// `places`.
struct Exchanged {
  const Arguments& given;
  int64_t num_tables, world_size, entries;
  Tensor places, bags, come;
  std::optional<Tensor> numbers;
  std::vector<int64_t> first_bags;  // [num_tables + 1] first bag of each table, then the end

  Exchanged(Arguments& given, const Tensor& places_in, const Tensor& bags_in,
            const Tensor& features, const Tensor& come_in, const std::vector<int64_t>& steps,
            const std::optional<Tensor>& numbers_in)
      : given(given), num_tables(static_cast<int64_t>(steps.size())) {
    const GroupFeatures group(given, features, steps.size());
    given.read("places", places_in, ScalarType::Int, 1);
    given.read("bags", bags_in, ScalarType::Int, 1);
    given.check(group.num_bags <= kMostNumbered && bags_in.numel() > group.num_bags, "bags has ",
                bags_in.numel(), " elements, but features have ", group.num_bags, " bags");
    given.check(come_in.is_cpu(), "come must be on the CPU");
    given.check_dtype("come", come_in, ScalarType::Long);
    given.check(come_in.dim() == 3 && come_in.size(0) == num_tables && come_in.size(1) >= 1 &&
                    come_in.size(1) <= kMaxWorldSize && come_in.size(2) == 2,
                "come must have shape [", num_tables, ", world_size, 2]");
    places = packed(places_in);
    bags = packed(bags_in);
    come = packed(come_in);
    if (numbers_in) {
      given.read("numbers", *numbers_in, ScalarType::Long, 1);
      given.check_size("numbers", *numbers_in, 0, num_tables);
      numbers = packed(*numbers_in);
    }
    world_size = come.size(1);
    entries = places.numel();
    given.check_count("places", entries);
    for (int64_t t = 0; t < num_tables; ++t) check_parts(t, steps[t]);
    int64_t bag = 0;
    for (int64_t t = 0; t < num_tables; ++t) {
      first_bags.push_back(bag);
      for (int64_t f = group.table_features[t]; f < group.table_features[t + 1]; ++f) {
        bag += group.features[f].bags;
      }
    }
    first_bags.push_back(bag);
  }

  const ComeVectors* parts(int64_t t) const {
    return reinterpret_cast<const ComeVectors*>(int64_data(come)) + t * world_size;
  }

  int64_t vectors(int64_t t) const { return parts(t)[world_size - 1].end; }

  // Checks a table's bags and its number of keys.
  void check_bounds(int64_t t, int64_t begin, int64_t end, int64_t keys) const {
    given.check(0 <= begin && begin <= end && end <= entries,
                "bags must rise to at most len(places) = ", entries, ", but those of table ", t,
                " go from ", begin, " to ", end);
    given.check(keys <= end - begin, "table ", t, " has ", end - begin, " entries, but ", keys,
                " keys");
  }
  [[noreturn]] void wrong_place(int64_t entry, int64_t place) const {
    given.index_error("places[", entry, "] is ", place, ", which is none of its table");
  }

 private:
  void check_parts(int64_t t, int64_t step) const {
    given.check(step >= 1 && step <= kMostNumbered, "steps[", t, "] must be in [1, 2^31), got ",
                step);
    int64_t before = 0;
    for (int64_t r = 0; r < world_size; ++r) {
      const ComeVectors& part = parts(t)[r];
      given.check(part.end >= before && part.end <= (numbers ? kMostNumbered : entries) &&
                      part.begin >= 0 && part.begin <= kMostNumbered &&
                      part.end - before <= (kMostNumbered - part.begin) / step,
                  "come[", t, "][", r, "] is ", part.begin, " and ", part.end, ", after ", before,
                  "; ends must rise to at most ",
                  numbers ? message("2^31 - 1") : message("len(places) = ", entries),
                  ", and rows stay below 2^31");
      before = part.end;
    }
  }
};

Tensor exchange_rows(const Tensor& places, const Tensor& bags, const Tensor& features,
                     const Tensor& come, const std::vector<int64_t>& steps,
                     const std::optional<Tensor>& numbers) {
  Arguments given("group_exchange_rows");
  const Exchanged asked(given, places, bags, features, come, steps, numbers);
  const int64_t num_tables = asked.num_tables;
  Tensor rows = new_output(asked.places, {asked.entries}, ScalarType::Int);
  const DeviceContext context(asked.places);
  if (num_tables == 0) return rows;
  if constexpr (kOnDevice) {
    const cuda::ExchangeCall call{num_tables,
                                  asked.world_size,
                                  asked.entries,
                                  asked.first_bags.data(),
                                  asked.parts(0),
                                  steps.data(),
                                  asked.numbers ? data<int64_t>(*asked.numbers) : nullptr,
                                  data<int32_t>(asked.bags),
                                  data<int32_t>(asked.places)};
    const Workspace memory(cuda::exchange_rows_workspace_bytes(call), rows);
    cuda::exchange_rows(call, mutable_data<int32_t>(rows),
                        {context.error_word(DeviceError::kExchangePlace),
                         context.error_word(DeviceError::kExchangeTable)},
                        memory.data(), context.stream());
    const int64_t bad_place = context.error_position(DeviceError::kExchangePlace, asked.entries);
    const int64_t bad_table = context.error_position(DeviceError::kExchangeTable, num_tables);
    if (bad_table >= 0) {
      asked.check_bounds(
          bad_table, context.value(asked.bags, asked.first_bags[bad_table]),
          context.value(asked.bags, asked.first_bags[bad_table + 1]),
          asked.numbers ? context.value(*asked.numbers, bad_table) : asked.vectors(bad_table));
    }
    if (bad_place >= 0) asked.wrong_place(bad_place, context.value(asked.places, bad_place));
  } else {
    const auto* bounds = data<int32_t>(asked.bags);
    const auto* given = data<int32_t>(asked.places);
    std::vector<RoutedTable> tables(steps.size());
    std::vector<int64_t> keys_of(steps.size());
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t begin = bounds[asked.first_bags[t]], end = bounds[asked.first_bags[t + 1]];
      keys_of[t] = asked.numbers ? int64_data(*asked.numbers)[t] : asked.vectors(t);
      asked.check_bounds(t, begin, end, keys_of[t]);
      tables[t].first_entry = begin;
      tables[t].n = end - begin;
    }
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t begin = tables[t].first_entry;
      const int64_t keys = keys_of[t], vectors = asked.vectors(t);
      const auto bad = [=](int32_t place) { return place < 0 || place >= vectors; };
      uint32_t most = 0;  // unsigned, so that negative positions become huge
      for (int64_t e = begin; e < begin + keys; ++e) {
        most = std::max(most, static_cast<uint32_t>(given[e]));
      }
      if (most >= vectors && keys > 0) {
        const int32_t* found = std::find_if(given + begin, given + begin + keys, bad);
        asked.wrong_place(found - given, *found);
      }
    }
    cpu::exchange_rows(tables.data(), num_tables, keys_of.data(), asked.world_size, asked.parts(0),
                       steps.data(), given, mutable_data<int32_t>(rows), torch_parallel_for());
  }
  return rows;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_bucketize", TORCH_BOX(&sparsekit::ops::bucketize));
  m.impl("group_exchange_rows", TORCH_BOX(&sparsekit::ops::exchange_rows));
}
