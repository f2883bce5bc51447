#include "sparsekit/group_find.h"

#include <algorithm>

#include "cpu/distinct_keys.h"
#include "cpu/probe.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 2048;
using WriteNewRows = int64_t (*)(const NewRows& to, int64_t num_rows, const int64_t* keys,
                                 const int64_t* rows, int64_t n, int64_t first_row,
                                 const ParallelFor& parallel_for);

template <class T>
int64_t write_new_rows(const NewRows& to, int64_t num_rows, const int64_t* keys,
                       const int64_t* rows, int64_t n, int64_t first_row,
                       const ParallelFor& parallel_for) {
  return init_rows(static_cast<T*>(to.weight), num_rows, to.dim, to.stride, keys, rows, n,
                   first_row, to.initializer, parallel_for);
}

struct Lookup {
  const GroupTable* tables;
  const NewRows* new_rows;
  int32_t* rows;
  const int64_t* counts;
  int64_t* refused;
  WriteNewRows write;

  // Finds or inserts the distinct keys of a table. found [n] is scratch memory.
  void find_rows(int64_t t, const int64_t* keys, int64_t* found,
                 const ParallelFor& parallel_for) const {
    const GroupTable& table = tables[t];
    const int64_t n = counts[t];
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
    // Writing fails only if the table is damaged and has a row beyond the weight.
    if (*table.size > size_before &&
        write(new_rows[t], table.capacity, keys, found, n, size_before, parallel_for) >= 0) {
      refused[t] = -1;
      return;
    }
    if (table.larger != nullptr && !insert_new(table, size_before, keys, found, n)) {
      refused[t] = -1;
      return;
    }
    for (int64_t j = 0; j < n; ++j) to[j] = static_cast<int32_t>(found[j]);
  }

  // Inserts the keys that have new rows into table.larger. Returns false if that has no free slot.
  static bool insert_new(const GroupTable& table, int64_t size_before, const int64_t* keys,
                         const int64_t* found, int64_t n) {
    int64_t next_row = size_before;
    for (int64_t j = 0; j < n; ++j) {
      if (found[j] != next_row) continue;
      const int64_t home = home_bucket(keys[j], table.hash_seed, table.num_larger);
      if (!insert_absent(table.larger, table.num_larger, home, keys[j],
                         static_cast<int32_t>(next_row++))) {
        return false;
      }
    }
    return true;
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
    with_keys(sources[feature.source], feature.key_start + first, feature.key_start + last,
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
  const DistinctKeys<GroupTable> distinct{tables, num_tables};
  return distinct.workspace_bytes(order, parallel_for);
}

template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t seed,
                          int32_t* rows, int32_t* inverse, int64_t* counts, int64_t* refused,
                          int32_t* order, void* workspace, const ParallelFor& parallel_for) {
  std::fill_n(refused, num_tables, int64_t{0});
  const Lookup lookup{tables, new_rows, rows, counts, refused, write_new_rows<T>};
  const DistinctKeys<GroupTable> distinct{tables, num_tables, sources, features,
                                          seed,   inverse,    counts};
  distinct.each(order, workspace, parallel_for,
                [&](int64_t t, const int64_t* keys, int64_t* found, const ParallelFor& own) {
                  lookup.find_rows(t, keys, found, own);
                });
}

SPARSEKIT_INSTANTIATE(group_find_or_insert)

}  // namespace sparsekit::cpu
