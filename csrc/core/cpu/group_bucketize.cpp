#include "sparsekit/group_bucketize.h"

#include <algorithm>
#include <utility>

#include "cpu/distinct_keys.h"
#include "cpu/first_bad.h"

namespace sparsekit::cpu {
namespace {

// Sorts the keys [n] of a table by owner into sorted [n]. places [n] receives the position of each
// key in `sorted` or, if max_keys > 0, in the fixed-size layout. counts[r * stride] becomes the
// number of keys that rank r owns. Returns false if the owner of any key is not a valid rank; such
// keys are assigned to rank 0.
bool sort_by_owner(const int64_t* keys, int64_t n, const Owners& owners, int64_t max_keys,
                   int32_t* owner_of_key, int64_t* sorted, int32_t* places, int64_t* counts,
                   int64_t stride) {
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
  // Turn counts into start positions. These positions advance as keys are moved, and are then
  // turned back into counts.
  int64_t begin = 0;
  for (int64_t r = 0; r < world_size; ++r) begin += std::exchange(counts[r * stride], begin);
  for (int64_t j = 0; j < n; ++j) {
    const int64_t place = counts[owner_of_key[j] * stride]++;
    sorted[place] = keys[j];
    places[j] = static_cast<int32_t>(place);
  }
  for (int64_t j = 0; max_keys > 0 && j < n; ++j) {
    const int64_t owner = owner_of_key[j];
    const int64_t number = places[j] - (owner == 0 ? 0 : counts[(owner - 1) * stride]);
    places[j] = static_cast<int32_t>(owner * max_keys + (number < max_keys ? number : 0));
  }
  for (int64_t r = world_size - 1; r > 0; --r) counts[r * stride] -= counts[(r - 1) * stride];
  return good;
}

// Up to this many ranks, one branch-free pass over all keys per rank is faster than a search for
// each key.
constexpr int64_t kFewRanks = 16;

// Computes, for each key of a table, the row of the receive buffer where its vector begins.
// Unsigned intermediate results may wrap around; only the final row numbers must fit in an int32.
void rows_of_few_ranks(const ComeVectors* ranks, int64_t world_size, int64_t step,
                       const int32_t* places, int64_t num_keys, int32_t* rows) {
  const auto at = [=](int64_t r, int64_t place) {
    const int64_t before = r == 0 ? 0 : ranks[r - 1].end;
    return static_cast<uint32_t>(ranks[r].begin) +
           (static_cast<uint32_t>(place) - static_cast<uint32_t>(before)) *
               static_cast<uint32_t>(step);
  };
  const uint32_t first = at(0, 0), factor = static_cast<uint32_t>(step);
  for (int64_t j = 0; j < num_keys; ++j) {
    rows[j] = static_cast<int32_t>(first + static_cast<uint32_t>(places[j]) * factor);
  }
  for (int64_t r = 1; r < world_size; ++r) {
    const auto begin = static_cast<int32_t>(ranks[r - 1].end);
    const auto further = static_cast<int32_t>(at(r, 0) - at(r - 1, 0));
    for (int64_t j = 0; j < num_keys; ++j) {
      const int32_t moved = places[j] >= begin ? further : 0;
      rows[j] = static_cast<int32_t>(static_cast<uint32_t>(rows[j]) + static_cast<uint32_t>(moved));
    }
  }
}

void rows_of_ranks(const ComeVectors* ranks, int64_t world_size, int64_t step,
                   const int32_t* places, int64_t num_keys, int32_t* rows) {
  const ComeVectors* end = ranks + world_size;
  for (int64_t j = 0; j < num_keys; ++j) {
    const int64_t place = places[j];
    const ComeVectors* from = std::upper_bound(
        ranks, end, place, [](int64_t p, const ComeVectors& rank) { return p < rank.end; });
    const int64_t before = from == ranks ? 0 : from[-1].end;
    rows[j] = static_cast<int32_t>(from->begin + (place - before) * step);
  }
}

}  // namespace

int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for) {
  Arena arena;
  arena.take<int64_t>(entries);
  arena.take<int64_t>(num_tables);
  const DistinctKeys<RoutedTable> distinct{tables, num_tables};
  arena.take<char>(distinct.workspace_bytes(order, parallel_for));
  return arena.bytes();
}

RouteErrors group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                            const Feature* features, int64_t world_size, bool distinct,
                            int64_t seed, const RoutedKeys& to, int32_t* order, void* workspace,
                            const ParallelFor& parallel_for) {
  if (num_tables == 0) return {-1, -1};
  const RoutedTable& last = tables[num_tables - 1];
  Arena parts(workspace);
  auto* sorted = parts.take<int64_t>(last.first_entry + last.n);
  auto* next = parts.take<int64_t>(num_tables);  // position of the next sorted key of each table
  auto* rest = parts.take<char>(0);
  std::fill_n(to.counts, world_size * num_tables, int64_t{0});
  const DistinctKeys<RoutedTable> keys_of{tables, num_tables, sources,    features,
                                          seed,   to.inverse, to.numbers, distinct};
  FirstBad bad_owners, too_many_keys;
  keys_of.each(order, rest, parallel_for,
               [&](int64_t t, const int64_t* keys, int64_t* scratch, const ParallelFor&) {
                 const int64_t first = tables[t].first_entry;
                 const bool good =
                     sort_by_owner(keys, to.numbers[t], tables[t].owners, tables[t].max_keys,
                                   reinterpret_cast<int32_t*>(scratch), sorted + first,
                                   to.places + first, to.counts + t, num_tables);
                 if (!good) bad_owners.report(t);
               });
  // For each rank, concatenate the keys that the rank owns, table by table.
  for (int64_t t = 0; t < num_tables; ++t) next[t] = tables[t].first_entry;
  int64_t begin = 0;
  for (int64_t r = 0; r < world_size; ++r) {
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t count = to.counts[r * num_tables + t];
      if (to.rank_places > 0) {
        const int64_t most = tables[t].max_keys;
        if (count > most) too_many_keys.report(t);
        std::copy_n(sorted + next[t], std::min(count, most),
                    to.keys + r * to.rank_places + tables[t].first_place);
      } else {
        std::copy_n(sorted + next[t], count, to.keys + begin);
      }
      next[t] += count;
      begin += count;
    }
  }
  return {bad_owners.position(), too_many_keys.position()};
}

void exchange_rows(const RoutedTable* tables, int64_t num_tables, const int64_t* numbers,
                   int64_t world_size, const ComeVectors* come, const int64_t* steps,
                   const int32_t* places, int32_t* rows, const ParallelFor& parallel_for) {
  if (world_size == 0) return;
  const auto rows_of = world_size <= kFewRanks ? rows_of_few_ranks : rows_of_ranks;
  parallel_for(0, num_tables, 4, [=](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; ++t) {
      const int64_t entry = tables[t].first_entry;
      rows_of(come + t * world_size, world_size, steps[t], places + entry, numbers[t],
              rows + entry);
    }
  });
}

}  // namespace sparsekit::cpu
