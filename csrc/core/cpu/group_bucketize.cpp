#include "sparsekit/group_bucketize.h"

#include <algorithm>

#include "cpu/distinct_keys.h"
#include "cpu/first_bad.h"

namespace sparsekit::cpu {
namespace {

// Keys of a table by owner: `keys` [n] to sorted [n], and places [n]. counts[r * stride] is how
// many rank r owns. False if there is a key that no rank owns, which then goes to rank 0.
bool sort_by_owner(const int64_t* keys, int64_t n, const Owners& owners, int32_t* owner_of_key,
                   int64_t* sorted, int32_t* places, int64_t* counts, int64_t stride) {
  const int64_t world_size = owners.world_size;
  for (int64_t r = 0; r < world_size; ++r) counts[r * stride] = 0;
  bool good = true;
  for (int64_t j = 0; j < n; ++j) {
    int64_t owner = owner_of(keys[j], owners);
    if (owner < 0 || owner >= world_size) {
      good = false;
      owner = 0;
    }
    owner_of_key[j] = static_cast<int32_t>(owner);
    ++counts[owner * stride];
  }
  // What is a count now is a place while keys are put there, and becomes a count again.
  int64_t begin = 0;
  for (int64_t r = 0; r < world_size; ++r) {
    const int64_t count = counts[r * stride];
    counts[r * stride] = begin;
    begin += count;
  }
  for (int64_t j = 0; j < n; ++j) {
    const int64_t place = counts[owner_of_key[j] * stride]++;
    sorted[place] = keys[j];
    places[j] = static_cast<int32_t>(place);
  }
  for (int64_t r = world_size - 1; r > 0; --r) counts[r * stride] -= counts[(r - 1) * stride];
  return good;
}

}  // namespace

int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for) {
  Workspace workspace(nullptr);
  workspace.take<int64_t>(entries);
  workspace.take<int64_t>(num_tables);
  const DistinctKeys<RoutedTable> distinct{tables, num_tables};
  workspace.take<char>(distinct.workspace_bytes(order, parallel_for));
  return workspace.used();
}

int64_t group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                        const Feature* features, int64_t world_size, bool distinct, int64_t seed,
                        const RoutedKeys& to, int32_t* order, void* workspace,
                        const ParallelFor& parallel_for) {
  if (num_tables == 0) return -1;
  const RoutedTable& last = tables[num_tables - 1];
  Workspace parts(workspace);
  auto* sorted = parts.take<int64_t>(last.first_entry + last.n);
  auto* next = parts.take<int64_t>(num_tables);  // of each table's sorted keys
  auto* rest = parts.take<char>(0);
  std::fill_n(to.counts, world_size * num_tables, int64_t{0});
  const DistinctKeys<RoutedTable> keys_of{tables, num_tables, sources,    features,
                                          seed,   to.inverse, to.numbers, distinct};
  FirstBad bad;
  keys_of.each(order, rest, parallel_for,
               [&](int64_t t, const int64_t* keys, int64_t* scratch, const ParallelFor&) {
                 const int64_t first = tables[t].first_entry;
                 const bool good = sort_by_owner(
                     keys, to.numbers[t], tables[t].owners, reinterpret_cast<int32_t*>(scratch),
                     sorted + first, to.places + first, to.counts + t, num_tables);
                 if (!good) bad.report(t);
               });
  // The pieces of all tables for a rank side by side.
  for (int64_t t = 0; t < num_tables; ++t) next[t] = tables[t].first_entry;
  int64_t begin = 0;
  for (int64_t r = 0; r < world_size; ++r) {
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t count = to.counts[r * num_tables + t];
      std::copy_n(sorted + next[t], count, to.keys + begin);
      next[t] += count;
      begin += count;
    }
  }
  return bad.position();
}

void exchange_rows(const RoutedTable* tables, int64_t num_tables, int64_t world_size,
                   const ComeVectors* come, const int64_t* steps, const int32_t* places,
                   int32_t* rows, const ParallelFor& parallel_for) {
  parallel_for(0, num_tables, 4, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t entry = tables[t].first_entry, step = steps[t];
      const ComeVectors *ranks = come + t * world_size, *end = ranks + world_size;
      const int64_t total = world_size == 0 ? 0 : end[-1].end;
      for (int64_t j = 0; j < total; ++j) {
        const int64_t place = places[entry + j];
        const ComeVectors* from = std::upper_bound(
            ranks, end, place, [](int64_t p, const ComeVectors& rank) { return p < rank.end; });
        const int64_t before = from == ranks ? 0 : from[-1].end;
        rows[entry + j] = static_cast<int32_t>(from->begin + (place - before) * step);
      }
    }
  });
}

}  // namespace sparsekit::cpu
