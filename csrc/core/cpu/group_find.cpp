#include "sparsekit/group_find.h"

#include <algorithm>

#include "cpu/numbering.h"
#include "cpu/share_work.h"
#include "cpu/workspace.h"
#include "sparsekit/unique.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 2048;
// Keys that are worth a thread of their own.
constexpr int64_t kWorth = 8192;

// Calls use(keys, begin, end) with the keys of a feature as what they are.
template <class Use>
void with_keys(const Source& source, int64_t begin, int64_t end, const Use& use) {
  if (source.wide_keys) {
    use(static_cast<const int64_t*>(source.keys), begin, end);
  } else {
    use(static_cast<const int32_t*>(source.keys), begin, end);
  }
}

// What the lookup of n entries in one table needs; two of the parts only if one thread does it all.
struct Memory {
  int64_t* keys;  // [n] distinct ones
  int64_t* rows;  // [n] theirs
  Distinct<int64_t>* distinct = nullptr;
  uint32_t* entries = nullptr;
  int64_t* given = nullptr;  // [n] keys, in order of entries
  void* unique = nullptr;

  Memory(Workspace& workspace, int64_t n, bool alone)
      : keys(workspace.take<int64_t>(n)), rows(workspace.take<int64_t>(n)) {
    if (alone) {
      distinct = workspace.take<Distinct<int64_t>>(n);
      entries = workspace.take<uint32_t>(Numbering<int64_t>::entries_for(n));
    } else {
      given = workspace.take<int64_t>(n);
      unique = workspace.take<char>(unique_workspace_bytes(n));
    }
  }

  static int64_t bytes(int64_t n, bool alone) {
    Workspace workspace(nullptr);
    Memory(workspace, n, alone);
    return workspace.used();
  }
};

SharedJobs shared_tables(const GroupTable* tables, int64_t num_tables, int32_t* order,
                         const ParallelFor& parallel_for) {
  return SharedJobs(num_tables, order, kWorth, parallel_for,
                    [=](int64_t t) { return tables[t].n; });
}

using WriteNewRows = int64_t (*)(const NewRows& to, int64_t num_rows, const int64_t* keys,
                                 const int64_t* rows, int64_t n, int64_t first_row,
                                 const ParallelFor& parallel_for);

template <class T>
int64_t write_new_rows(const NewRows& to, int64_t num_rows, const int64_t* keys,
                       const int64_t* rows, int64_t n, int64_t first_row,
                       const ParallelFor& parallel_for) {
  return init_rows(static_cast<T*>(to.weight), num_rows, to.dim, keys, rows, n, first_row,
                   to.initializer, parallel_for);
}

struct Lookup {
  const GroupTable* tables;
  const NewRows* new_rows;
  const Source* sources;
  const Feature* features;
  int64_t seed;
  int32_t* rows;
  int32_t* inverse;
  int64_t* counts;
  int64_t* refused;
  WriteNewRows write;

  template <class Use>
  void each_feature(const GroupTable& table, const Use& use) const {
    for (int64_t f = 0; f < table.features; ++f) {
      const Feature& feature = features[table.first_feature + f];
      with_keys(sources[feature.source], feature.first_key, feature.first_key + feature.n,
                [&](auto keys, int64_t begin, int64_t end) { use(feature, keys, begin, end); });
    }
  }

  // One thread.
  void alone(int64_t t, void* workspace) const {
    const GroupTable& table = tables[t];
    Workspace parts(workspace);
    const Memory memory(parts, table.n, true);
    Numbering<int64_t> numbering(memory.distinct, table.n, memory.entries, seed);
    each_feature(table, [&](const Feature& feature, auto keys, int64_t begin, int64_t end) {
      int32_t* to = inverse + feature.first_entry;
      numbering.add(keys, begin, end, [=](int64_t i, uint32_t number) {
        to[i - begin] = static_cast<int32_t>(number & ~kFirst);
      });
    });
    counts[t] = numbering.size();
    for (int64_t j = 0; j < counts[t]; ++j) memory.keys[j] = memory.distinct[j].key;
    find_rows(t, memory, one_thread());
  }

  // All threads.
  void together(int64_t t, void* workspace, const ParallelFor& parallel_for) const {
    const GroupTable& table = tables[t];
    Workspace parts(workspace);
    const Memory memory(parts, table.n, false);
    const int64_t* given = memory.given;
    each_feature(table, [&](const Feature& feature, auto keys, int64_t begin, int64_t end) {
      if constexpr (sizeof(*keys) == sizeof(*given)) {
        if (feature.n == table.n) {
          given = keys + begin;
          return;
        }
      }
      int64_t* to = memory.given + (feature.first_entry - table.first_entry);
      parallel_for(begin, end, kWorth,
                   [=](int64_t b, int64_t e) { std::copy(keys + b, keys + e, to + (b - begin)); });
    });
    counts[t] = unique(given, table.n, seed, memory.keys, inverse + table.first_entry, nullptr,
                       memory.unique, parallel_for);
    find_rows(t, memory, parallel_for);
  }

  // The rest, where the distinct keys are known.
  void find_rows(int64_t t, const Memory& memory, const ParallelFor& parallel_for) const {
    const GroupTable& table = tables[t];
    const int64_t n = counts[t];
    const auto [keys, found] = std::pair(memory.keys, memory.rows);
    refused[t] = 0;
    int32_t* to = rows + table.first_entry;
    if (table.buckets == nullptr) {
      const int64_t world_size = table.world_size;
      for (int64_t j = 0; j < n; ++j) to[j] = static_cast<int32_t>(keys[j] / world_size);
      return;
    }
    const int64_t size_before = *table.size;
    refused[t] =
        hash_table_find_or_insert(table.buckets, table.num_buckets, table.hash_seed, table.size,
                                  table.capacity, keys, n, found, parallel_for);
    if (refused[t] != 0) return;
    // A row beyond the weight is in a table that is damaged.
    if (*table.size > size_before &&
        write(new_rows[t], table.capacity, keys, found, n, size_before, parallel_for) >= 0) {
      refused[t] = -1;
      return;
    }
    for (int64_t j = 0; j < n; ++j) to[j] = static_cast<int32_t>(found[j]);
  }
};

}  // namespace

void group_find(const GroupTable* tables, const Source* sources, const Feature* features,
                int64_t num_features, int32_t* rows, int64_t* units_before,
                const ParallelFor& parallel_for) {
  units_before[0] = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    units_before[f + 1] = units_before[f] + (features[f].n + kGrain - 1) / kGrain;
  }
  share_units(units_before, num_features, parallel_for, [=](int64_t f, int64_t unit, int64_t) {
    const Feature& feature = features[f];
    const GroupTable& table = tables[feature.table];
    const int64_t first = unit * kGrain, last = std::min(feature.n, first + kGrain);
    int32_t* to = rows + feature.first_entry + first;
    with_keys(sources[feature.source], feature.first_key + first, feature.first_key + last,
              [&](auto keys, int64_t begin, int64_t end) {
                if (table.buckets != nullptr) {
                  hash_table_find(table.buckets, table.num_buckets, table.hash_seed, keys + begin,
                                  end - begin, to, one_thread());
                } else {
                  for (int64_t i = begin; i < end; ++i) {
                    to[i - begin] = static_cast<int32_t>(keys[i] / table.world_size);
                  }
                }
              });
  });
}

int64_t group_find_or_insert_workspace_bytes(const GroupTable* tables, int64_t num_tables,
                                             int32_t* order, const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  int64_t together = 0, alone = 0;
  for (int64_t place = 0; place < num_tables; ++place) {
    int64_t& most = place < jobs.num_together() ? together : alone;
    most = std::max(most, tables[jobs.job(place)].n);
  }
  return std::max(together > 0 ? Memory::bytes(together, false) : 0,
                  alone > 0 ? jobs.threads() * Memory::bytes(alone, true) : 0);
}

template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t seed,
                          int32_t* rows, int32_t* inverse, int64_t* counts, int64_t* refused,
                          int32_t* order, void* workspace, const ParallelFor& parallel_for) {
  const Lookup lookup{tables, new_rows, sources, features, seed,
                      rows,   inverse,  counts,  refused,  write_new_rows<T>};
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  int64_t alone = 0;
  for (int64_t place = jobs.num_together(); place < num_tables; ++place) {
    alone = std::max(alone, tables[jobs.job(place)].n);
  }
  const int64_t bytes = Memory::bytes(alone, true);
  const auto empty = [&](int64_t t) {
    if (tables[t].n == 0) counts[t] = refused[t] = 0;
    return tables[t].n == 0;
  };
  jobs.run([&](int64_t t) { lookup.together(t, workspace, parallel_for); },
           [&](int64_t t, int64_t thread) {
             if (!empty(t)) lookup.alone(t, static_cast<char*>(workspace) + thread * bytes);
           });
}

#define SPARSEKIT_INSTANTIATE(T)                                                                   \
  template void group_find_or_insert<T>(const GroupTable*, int64_t, const NewRows*, const Source*, \
                                        const Feature*, int64_t, int32_t*, int32_t*, int64_t*,     \
                                        int64_t*, int32_t*, void*, const ParallelFor&);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
