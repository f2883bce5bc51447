#include "sparsekit/group_find.h"

#include "cuda/group.cuh"
#include "cuda/workspace.h"
#include "sparsekit/unique.h"

namespace sparsekit::cuda {
namespace {

// A thread for each offset and each key of a feature.
SPARSEKIT_KERNEL check_group_kernel(DeviceFeature feature, bool whole, int64_t first_offset,
                                    int64_t first_key, int64_t end_key, GroupErrors errors) {
  const int64_t i = simt::global_thread();
  const Source& source = feature.source;
  if (source.offsets != nullptr && whole && i <= source.bags) {
    const int64_t at = source.offset(i), before = i == 0 ? 0 : source.offset(i - 1);
    const bool good =
        before <= at && at <= (i == 0 ? 0 : source.n) && (i < source.bags || at == source.n);
    if (!good) simt::atomic_min(errors.bad_offset, first_offset + i);
  }
  if (i < feature.bags) {
    const int64_t bag = feature.first_bag + i;
    const int64_t low = source.offset(bag), high = source.offset(bag + 1);
    // Of bad offsets the difference may be anything.
    const bool good = 0 <= low && low <= high && high <= source.n;
    if (good && high - low > feature.most) simt::atomic_min(errors.long_bag, first_offset + bag);
  }
  const int64_t begin = feature.first_key();
  if (end_key < 0 || i >= feature.last_key() - begin) return;
  const int64_t key = source.key(begin + i);
  if (key < 0 || key >= end_key) simt::atomic_min(errors.bad_key, first_key + begin + i);
}

// Keys of a feature to where its entries are, counted from the first one of its table.
SPARSEKIT_KERNEL collect_keys_kernel(DeviceFeature feature, const int64_t* table_entry,
                                     int64_t* keys) {
  const int64_t begin = feature.first_key(), count = feature.count();
  const int64_t to = feature.entry[0] - *table_entry;
  for (int64_t i = simt::global_thread(); i < count; i += simt::global_threads()) {
    keys[to + i] = feature.source.key(begin + i);
  }
}

SPARSEKIT_KERNEL count_entries_kernel(const int64_t* begin, const int64_t* end, int64_t* count) {
  if (simt::global_thread() == 0) *count = *end - *begin;
}

SPARSEKIT_KERNEL divide_keys_kernel(const int64_t* keys, DeviceCount n, int64_t world_size,
                                    int64_t* rows, int64_t* status) {
  const int64_t i = simt::global_thread();
  if (i < n.get()) rows[i] = keys[i] / world_size;
  if (i < 2 && status != nullptr) status[i] = 0;
}

// Numbers of a table's entries, or of its distinct keys, to where those of all tables are.
SPARSEKIT_KERNEL place_numbers_kernel(const int64_t* numbers, DeviceCount n,
                                      const int64_t* table_entry, int32_t* to) {
  const int64_t i = simt::global_thread();
  if (i < n.get()) to[*table_entry + i] = static_cast<int32_t>(numbers[i]);
}

void place_numbers(const int64_t* numbers, DeviceCount n, const int64_t* table_entry, int32_t* to,
                   void* stream) {
  simt::launch("group_find: place", place_numbers_kernel, simt::grid_for(n.most), stream, numbers,
               n, table_entry, to);
}

struct FindWorkspace {
  int64_t* entry;  // [features + 1]
  int64_t* count;  // [1] entries of the table
  int64_t* keys;   // [n], by entry
  int64_t* rows;   // [n]
  // To insert:
  int64_t* distinct = nullptr;  // [n]
  int64_t* inverse = nullptr;
  int64_t* occurrences = nullptr;
  char* unique = nullptr;
  char* insert = nullptr;

  FindWorkspace(Arena& arena, int64_t most, int64_t num_features, bool inserts)
      : entry(arena.take<int64_t>(num_features + 1)),
        count(arena.take<int64_t>(1)),
        keys(arena.take<int64_t>(most)),
        rows(arena.take<int64_t>(most)) {
    if (!inserts) return;
    distinct = arena.take<int64_t>(most);
    inverse = arena.take<int64_t>(most);
    occurrences = arena.take<int64_t>(most);
    unique = arena.take<char>(unique_workspace_bytes(most));
    insert = arena.take<char>(hash_table_find_or_insert_workspace_bytes(most));
  }
};

int64_t most_entries(const GroupTable* tables, int64_t num_tables) {
  int64_t most = 0;
  for (int64_t t = 0; t < num_tables; ++t) most = std::max(most, tables[t].n);
  return most;
}

void find_entries(const Source* sources, const Feature* features, int64_t num_features,
                  int64_t entries, const FindWorkspace& work, void* stream) {
  for (int64_t f = 0; f < num_features; ++f) {
    group_entries(device_feature(sources, features, f, work.entry), f, entries, stream);
  }
}

// The keys of a table's entries side by side, and how many there are.
DeviceCount collect_keys(const GroupTable& table, const Source* sources, const Feature* features,
                         const FindWorkspace& work, void* stream) {
  const int64_t* begin = work.entry + table.first_feature;
  simt::launch("group_find: count", count_entries_kernel, simt::grid_for(1, 32), stream, begin,
               begin + table.features, work.count);
  for (int64_t f = table.first_feature; f < table.first_feature + table.features; ++f) {
    const DeviceFeature feature = device_feature(sources, features, f, work.entry);
    simt::launch("group_find: collect", collect_keys_kernel,
                 simt::strided_grid_for(feature.bound()), stream, feature, begin, work.keys);
  }
  return {table.n, work.count};
}

}  // namespace

void check_group(const Source* sources, const Feature* features, int64_t num_features,
                 const int64_t* first_offset, const int64_t* first_key, const int64_t* end_key,
                 const GroupErrors& errors, void* stream) {
  for (int64_t f = 0; f < num_features; ++f) {
    const DeviceFeature feature = device_feature(sources, features, f, nullptr);
    const int64_t s = features[f].source;
    // All offsets of a source with its first feature, and again if that is not next to the others.
    const bool whole = f == 0 || features[f - 1].source != s;
    const int64_t threads = std::max(feature.source.bags + 1, feature.source.n);
    simt::launch("group: check", check_group_kernel, simt::grid_for(threads), stream, feature,
                 whole, first_offset[s], first_key[s], end_key[f], errors);
  }
}

SPARSEKIT_KERNEL write_bags_kernel(DeviceFeature feature, int32_t* bags, int64_t* first_key) {
  const int64_t i = simt::global_thread(), begin = feature.first_key();
  if (i == 0) *first_key = begin;
  if (i > feature.bags) return;
  // In the order of the bags whatever offsets are, and no further than the feature's entries.
  const int64_t at = feature.clamped(feature.first_bag + i, begin) - begin;
  const int64_t count = feature.count();
  bags[i] = static_cast<int32_t>(feature.entry[0] + (at < count ? at : count));
}
SPARSEKIT_KERNEL no_bags_kernel(int32_t* bags) {
  if (simt::global_thread() == 0) *bags = 0;
}

int64_t write_bags_workspace_bytes(int64_t num_features) {
  Arena arena;
  arena.take<int64_t>(num_features + 1);
  return arena.bytes();
}

void write_bags(const Source* sources, const Feature* features, int64_t num_features,
                int64_t entries, int32_t* bags, int64_t* first_keys, void* workspace,
                void* stream) {
  Arena arena(workspace);
  auto* entry = arena.take<int64_t>(num_features + 1);
  if (num_features == 0) {
    simt::launch("group: no bags", no_bags_kernel, simt::grid_for(1, 32), stream, bags);
  }
  for (int64_t f = 0; f < num_features; ++f) {
    const DeviceFeature feature = device_feature(sources, features, f, entry);
    group_entries(feature, f, entries, stream);
    // The end of one feature is where the next begins, which writes it again.
    simt::launch("group: bags", write_bags_kernel, simt::grid_for(feature.bags + 1), stream,
                 feature, bags, first_keys + f);
    bags += feature.bags;
  }
}

int64_t group_find_workspace_bytes(const GroupTable* tables, int64_t num_tables,
                                   int64_t num_features, bool insert) {
  Arena arena;
  FindWorkspace(arena, most_entries(tables, num_tables), num_features, insert);
  return arena.bytes();
}

void group_find(const GroupTable* tables, int64_t num_tables, const Source* sources,
                const Feature* features, int64_t num_features, int64_t entries, int32_t* rows,
                void* workspace, void* stream) {
  Arena arena(workspace);
  const FindWorkspace work(arena, most_entries(tables, num_tables), num_features, false);
  find_entries(sources, features, num_features, entries, work, stream);
  for (int64_t t = 0; t < num_tables; ++t) {
    const GroupTable& table = tables[t];
    if (table.n == 0) continue;
    const DeviceCount n = collect_keys(table, sources, features, work, stream);
    if (table.buckets != nullptr) {
      hash_table_find(table.buckets, table.num_buckets, table.device_hash_seed, work.keys, n,
                      work.rows, stream);
    } else {
      simt::launch("group_find: divide", divide_keys_kernel, simt::grid_for(n.most), stream,
                   work.keys, n, table.world_size, work.rows, nullptr);
    }
    place_numbers(work.rows, n, work.entry + table.first_feature, rows, stream);
  }
}

template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t num_features,
                          int64_t entries, int64_t seed, int32_t* rows, int32_t* inverse,
                          int64_t* counts, int64_t* status, int64_t* bad_row, void* workspace,
                          void* stream) {
  Arena arena(workspace);
  const FindWorkspace work(arena, most_entries(tables, num_tables), num_features, true);
  find_entries(sources, features, num_features, entries, work, stream);
  for (int64_t t = 0; t < num_tables; ++t) {
    const GroupTable& table = tables[t];
    const DeviceCount n = collect_keys(table, sources, features, work, stream);
    unique(work.keys, n, seed, work.distinct, work.inverse, work.occurrences, counts + t,
           work.unique, stream);
    const DeviceCount distinct{table.n, counts + t};
    if (table.buckets != nullptr) {
      hash_table_find_or_insert(table.buckets, table.num_buckets, table.device_hash_seed,
                                table.size, table.capacity, work.distinct, distinct, work.rows,
                                status + 2 * t, work.insert, stream);
      const NewRows& to = new_rows[t];
      init_rows(static_cast<T*>(to.weight), table.capacity, to.dim, work.distinct, work.rows,
                table.n, status + 2 * t, to.initializer, to.device_seed, bad_row, stream);
    } else {
      simt::launch("group_find: divide", divide_keys_kernel,
                   simt::grid_for(std::max<int64_t>(table.n, 2)), stream, work.distinct, distinct,
                   table.world_size, work.rows, status + 2 * t);
    }
    if (table.n == 0) continue;
    const int64_t* begin = work.entry + table.first_feature;
    place_numbers(work.inverse, n, begin, inverse, stream);
    place_numbers(work.rows, distinct, begin, rows, stream);
  }
}

#define SPARSEKIT_INSTANTIATE(T)                                                                   \
  template void group_find_or_insert<T>(const GroupTable*, int64_t, const NewRows*, const Source*, \
                                        const Feature*, int64_t, int64_t, int64_t, int32_t*,       \
                                        int32_t*, int64_t*, int64_t*, int64_t*, void*, void*);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
