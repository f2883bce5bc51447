#include "cuda/group.cuh"

namespace sparsekit::cuda {
namespace {

// Computes, in a single block, where the entries and keys of each feature begin.
template <class Words>
SPARSEKIT_KERNEL group_entries_kernel(SPARSEKIT_GRID_CONSTANT(Words) parcel, DeviceGroup group) {
  parcel.unpack();
  const auto key_start = [&](int f) {
    const DeviceFeature& feature = group.features[f];
    return clamped_offset(group.source(feature.source), feature.first_bag, 0);
  };
  const auto count = [&](int f) {
    const DeviceFeature& feature = group.features[f];
    const int64_t first = key_start(f), last_bag = feature.first_bag + group.num_bags(f);
    return clamped_offset(group.source(feature.source), last_bag, first) - first;
  };
  sum_up(group.num_features, count, [&](int f, int64_t before) {
    // With bad offsets there may be more entries than the result buffers can hold.
    group.entry[f] = before < group.most ? static_cast<int32_t>(before) : group.most;
    if (f < group.num_features) group.key_starts[f] = key_start(f);
  });
}

// Writes the index of bag i's first entry, counted over all features. For i = num_bags, writes the
// total number of entries.
SPARSEKIT_DEVICE void write_bag(const DeviceGroup& group, int64_t i, int64_t num_bags,
                                int32_t* bags, int64_t* long_bag) {
  if (i == num_bags) {
    bags[i] = group.entries();
    return;
  }
  const int f = last_up_to(i, group.num_features, [&](int g) { return group.features[g].first; });
  const DeviceFeature& feature = group.features[f];
  const Source source = group.source(feature.source);
  const int64_t bag = feature.first_bag + (i - feature.first);
  // Clamp the position to the feature's entries, since offsets may be bad.
  const int64_t at = clamped_offset(source, bag, group.key_starts[f]) - group.key_starts[f];
  const int64_t count = group.entry[f + 1] - group.entry[f];
  bags[i] = static_cast<int32_t>(group.entry[f] + (at < count ? at : count));
  // Subtract only good offsets; the difference of bad offsets could overflow.
  const int64_t low = offset_at(source, bag), high = offset_at(source, bag + 1);
  const bool good = 0 <= low && low <= high && high <= source.n;
  if (good && high - low > feature.max_nnz) {
    simt::atomic_min(long_bag, group.sources[feature.source].first_offset + bag);
  }
}

// Checks element i of the concatenated offsets of all sources.
SPARSEKIT_DEVICE void check_offset(const DeviceGroup& group, int64_t i, int64_t* bad_offset) {
  const auto first = [&](int s) { return group.sources[s].first_offset; };
  const int s = last_up_to(i, group.num_sources, first);
  if (!group.sources[s].asked) return;
  const Source source = group.source(s);
  if (source.offsets == nullptr) return;
  const int64_t bag = i - first(s);
  const int64_t at = offset_at(source, bag), before = bag == 0 ? 0 : offset_at(source, bag - 1);
  const bool good =
      before <= at && at <= (bag == 0 ? 0 : source.n) && (bag < source.bags || at == source.n);
  if (!good) simt::atomic_min(bad_offset, i);
}

// Reports the key of entry e if the key is outside the range that its table allows.
SPARSEKIT_DEVICE void check_key(const DeviceGroup& group, int32_t e, int64_t* bad_key) {
  const int f = group.feature_of(e), t = group.features[f].table;
  if (group.ends[t] < 0 || group.takes(t, group.key(f, e))) return;
  const DeviceSource& source = group.sources[group.features[f].source];
  simt::atomic_min(bad_key, source.key_start + group.key_starts[f] + (e - group.entry[f]));
}

// Writes bags, checks offsets and checks keys, with one thread per bag, per offset and, if any
// table limits keys, per entry.
SPARSEKIT_KERNEL group_bags_kernel(DeviceGroup group, int64_t num_bags, int64_t num_offsets,
                                   int32_t* bags, GroupErrors errors) {
  int64_t i = simt::global_thread();
  if (i <= num_bags) return write_bag(group, i, num_bags, bags, errors.long_bag);
  i -= num_bags + 1;
  if (i < num_offsets) return check_offset(group, i, errors.bad_offset);
  i -= num_offsets;
  if (group.ends == nullptr || i >= group.entries()) return;
  check_key(group, static_cast<int32_t>(i), errors.bad_key);
}

std::vector<DeviceSource> device_sources(const GroupCall& call) {
  std::vector<DeviceSource> sources(static_cast<size_t>(call.num_sources + 1));
  for (int64_t s = 0; s < call.num_sources; ++s) {
    const Source& of = call.sources[s];
    DeviceSource& source = sources[static_cast<size_t>(s)];
    source.keys = of.keys;
    source.offsets = of.offsets;
    source.wide_keys = of.wide_keys;
    source.wide_offsets = of.wide_offsets;
    DeviceSource& next = sources[static_cast<size_t>(s + 1)];
    next.first_offset = source.first_offset + of.bags + 1;
    next.key_start = source.key_start + static_cast<int32_t>(of.n);
  }
  for (int64_t f = 0; f < call.num_features; ++f) {
    sources[static_cast<size_t>(call.features[f].source)].asked = true;
  }
  return sources;
}

std::vector<DeviceFeature> device_features(const GroupCall& call) {
  std::vector<DeviceFeature> features;
  features.reserve(static_cast<size_t>(call.num_features + 1));
  int64_t first = 0;
  for (int64_t f = 0; f < call.num_features; ++f) {
    const Feature& of = call.features[f];
    features.push_back({static_cast<int32_t>(of.table), static_cast<int32_t>(of.source),
                        of.first_bag, first, of.max_nnz});
    first += of.bags;
  }
  features.push_back({0, 0, 0, first, 0});
  return features;
}

const AskedTable& asked(const GroupCall& call, int64_t t) {
  if (call.routed != nullptr) return call.routed[t];
  return call.tables[t];
}

// Returns true if any table limits the range of its keys.
bool limits_keys(const GroupCall& call) {
  for (int64_t t = 0; t < call.num_tables; ++t) {
    if (asked(call, t).end >= 0) return true;
  }
  return false;
}

// Returns a vector with of(t) for each table t, and with space reserved for one more element.
template <class D, class Of>
std::vector<D> for_tables(const GroupCall& call, const Of& of) {
  std::vector<D> all;
  all.reserve(static_cast<size_t>(call.num_tables + 1));
  for (int64_t t = 0; t < call.num_tables; ++t) all.push_back(of(t));
  return all;
}

std::vector<int32_t> first_features(const GroupCall& call) {
  auto first = for_tables<int32_t>(
      call, [&](int64_t t) { return static_cast<int32_t>(asked(call, t).first_feature); });
  first.push_back(static_cast<int32_t>(call.num_features));
  return first;
}

std::vector<DeviceTable> device_tables(const GroupCall& call) {
  std::vector<DeviceTable> tables(static_cast<size_t>(call.num_tables));
  for (int64_t t = 0; t < call.num_tables; ++t) {
    const GroupTable& of = call.tables[t];
    DeviceTable& table = tables[static_cast<size_t>(t)];
    table.buckets = of.buckets;
    table.num_buckets = of.num_buckets;
    table.hash_seed = of.device_hash_seed;
    table.size = of.size;
    table.capacity = static_cast<int32_t>(of.capacity);
    table.world_size = static_cast<int32_t>(of.world_size);
    table.larger = of.larger;
    table.num_larger = of.num_larger;
    if (call.new_rows == nullptr) continue;
    const NewRows& rows = call.new_rows[t];
    table.weight = rows.weight;
    table.dim = static_cast<int32_t>(rows.dim);
    table.stride = rows.stride;
    table.seed = rows.device_seed;
    table.distribution = rows.initializer.distribution;
    table.a = rows.initializer.a;
    table.b = rows.initializer.b;
  }
  return tables;
}

// Places the arrays in the order of add_kept().
void place_kept(const GroupCall& call, DescriptorArena& arena, DeviceGroup& group) {
  group.features = arena.take<DeviceFeature>(call.num_features + 1);
  group.first_features = arena.take<int32_t>(call.num_tables + 1);
  if (limits_keys(call)) group.ends = arena.take<int64_t>(call.num_tables);
  if (call.routed != nullptr) {
    group.routes = arena.take<DeviceRoute>(call.num_tables);
  } else {
    group.tables = arena.take<DeviceTable>(call.num_tables);
  }
}

// Places the arrays in the order in which begin_group sends them.
void place_descriptors(const GroupCall& call, DescriptorArena& arena, DeviceGroup& group) {
  group.sources = arena.take<DeviceSource>(call.num_sources + 1);
  if (call.kept == nullptr) return place_kept(call, arena, group);
  DescriptorArena kept(const_cast<void*>(call.kept));
  place_kept(call, kept, group);
}

// Adds the descriptors that remain the same while tables and numbers of bags do.
void add_kept(const GroupCall& call, Descriptors& descriptors) {
  descriptors.add(device_features(call));
  descriptors.add(first_features(call));
  if (limits_keys(call)) {
    descriptors.add(for_tables<int64_t>(call, [&](int64_t t) { return asked(call, t).end; }));
  }
  if (call.routed == nullptr) {
    descriptors.add(device_tables(call));
    return;
  }
  descriptors.add(for_tables<DeviceRoute>(call, [&](int64_t t) {
    const RoutedTable& of = call.routed[t];
    return DeviceRoute{of.owners, of.first_place, static_cast<int32_t>(of.max_keys), 0};
  }));
}

}  // namespace

const void* keep_descriptors(const GroupCall& call, const KeepOnDevice& keep) {
  DescriptorArena sizes;
  DeviceGroup group{};
  place_descriptors(call, sizes, group);
  if (static_cast<size_t>(sizes.bytes()) <= Descriptors::kMostAlong) return nullptr;
  Descriptors kept(nullptr);
  add_kept(call, kept);
  return keep(kept.all().data(), static_cast<int64_t>(kept.all().size()));
}

DeviceGroup device_group(const GroupCall& call, const GroupBags& bags, Arena& arena) {
  const auto narrow = [](int64_t n) { return static_cast<int32_t>(n); };
  DeviceGroup group{};
  DescriptorArena sizes;
  place_descriptors(call, sizes, group);
  DescriptorArena places(arena.take<char>(sizes.bytes()));
  place_descriptors(call, places, group);
  group.num_sources = narrow(call.num_sources);
  group.num_features = narrow(call.num_features);
  group.num_tables = narrow(call.num_tables);
  group.most = narrow(call.entries);
  group.entry = arena.take<int32_t>(call.num_features + 1);
  group.key_starts = bags.key_starts;
  return group;
}

void begin_group(const GroupCall& call, const GroupBags& bags, const GroupErrors& errors,
                 void* workspace, void* stream) {
  Arena arena(workspace);
  const DeviceGroup group = device_group(call, bags, arena);
  Descriptors descriptors(group.sources);
  const std::vector<DeviceSource> sources = device_sources(call);
  descriptors.add(sources);
  if (call.kept == nullptr) add_kept(call, descriptors);
  descriptors.send_with("group: entries", group_entries_kernel<LittleExtra>,
                        group_entries_kernel<MuchExtra>, stream, group);
  const int64_t num_offsets = sources.back().first_offset;
  const int64_t checked = group.ends == nullptr ? 0 : call.entries;
  const int64_t threads = call.num_bags + 1 + num_offsets + checked;
  simt::launch("group: bags", group_bags_kernel, simt::grid_for(threads, kGroupThreads), stream,
               group, call.num_bags, num_offsets, bags.bags, errors);
}

}  // namespace sparsekit::cuda
