// Writes the scores of the rows that a lookup of many tables has touched.
#include "sparsekit/group_touch.h"

#include <algorithm>

#include "cuda/descriptors.cuh"
#include "sparsekit/arena.h"

namespace sparsekit::cuda {
namespace {

SPARSEKIT_DEVICE int64_t clamped(int64_t at, int64_t end) {
  return at < 0 ? 0 : at > end ? end : at;
}

// The tables with scores, and what the lookup has found.
struct Touched {
  const TouchedTable* tables;
  int32_t num_tables;
  FoundRows found;

  struct Entries {
    int64_t first, n, num_distinct;
  };

  SPARSEKIT_DEVICE int64_t first_entry(int t) const { return found.bags[tables[t].first_bag]; }

  // Returns the table to which entry e belongs if its table has scores.
  SPARSEKIT_DEVICE int table_of(int64_t e) const {
    return last_up_to(e, num_tables, [this](int t) { return first_entry(t); });
  }
  SPARSEKIT_DEVICE Entries entries_of(int t) const {
    const TouchedTable& table = tables[t];
    const int64_t first = clamped(first_entry(t), found.entries);
    const int64_t end = clamped(found.bags[table.first_bag + table.bags], found.entries);
    const int64_t n = end > first ? end - first : 0;
    return {first, n, clamped(found.counts[table.table], n)};
  }
};

// Adds the touches of each entry to the count of its key. The count of distinct key j of a table is
// at the position of the table's entry j.
SPARSEKIT_KERNEL count_touches_kernel(Touched touched, int64_t* counts) {
  const FoundRows& found = touched.found;
  // All lanes of a warp iterate together, since they compare their keys.
  for (int64_t begin = simt::global_thread() - simt::lane(); begin < found.entries;
       begin += simt::global_threads()) {
    const int64_t e = begin + simt::lane();
    int64_t at = -1;
    if (e < found.entries) {
      const int t = touched.table_of(e);
      const auto [first, n, num_distinct] = touched.entries_of(t);
      const bool is_counted = touched.tables[t].policy == ScorePolicy::kLfu;
      if (is_counted && e >= first && e < first + n) {
        const int64_t number = found.index[e];
        if (number >= 0 && number < num_distinct) at = first + number;
      }
    }
    if (found.occurrences != nullptr) {
      if (at >= 0) simt::atomic_add(&counts[at], static_cast<int64_t>(found.touches(e)));
      continue;
    }
    // One lane adds for all lanes with the same key.
    const uint32_t same = simt::warp_match(at);
    if (at >= 0 && simt::lowest_bit(same) == simt::lane()) {
      simt::atomic_add(&counts[at], int64_t{simt::count_bits(same)});
    }
  }
}

SPARSEKIT_KERNEL touch_rows_kernel(Touched touched, const int64_t* counts) {
  const FoundRows& found = touched.found;
  for (int64_t e = simt::global_thread(); e < found.entries; e += simt::global_threads()) {
    const int t = touched.table_of(e);
    const auto [first, n, num_distinct] = touched.entries_of(t);
    if (e < first || e >= first + num_distinct) continue;
    const TouchedTable& table = touched.tables[t];
    const int64_t row = found.rows[e];
    if (row < 0 || row >= table.capacity) continue;
    int64_t* score = simt::global(table.scores) + row;
    const int64_t clock = *simt::global(table.clock);
    *score = table.policy == ScorePolicy::kLru
                 ? clock
                 : LfuClock(clock, table.halve_every).add(*score, static_cast<uint64_t>(counts[e]));
  }
}

bool counts_touches(const TouchedTable* tables, int64_t num_tables) {
  return std::any_of(tables, tables + num_tables,
                     [](const TouchedTable& table) { return table.policy == ScorePolicy::kLfu; });
}

}  // namespace

int64_t group_touch_workspace_bytes(const TouchedTable* tables, int64_t num_tables,
                                    int64_t entries) {
  return counts_touches(tables, num_tables) ? entries * static_cast<int64_t>(sizeof(int64_t)) : 0;
}

void group_touch(const TouchedTable* tables, const TouchedTable* on_device, int64_t num_tables,
                 const FoundRows& found, void* workspace, void* stream) {
  if (found.entries == 0) return;
  const Touched touched{on_device, static_cast<int32_t>(num_tables), found};
  const simt::Grid grid = simt::strided_grid_for(found.entries, kGroupThreads);
  auto* counts = static_cast<int64_t*>(workspace);
  if (counts_touches(tables, num_tables)) {
    simt::fill_bytes(counts, 0, group_touch_workspace_bytes(tables, num_tables, found.entries),
                     stream);
    simt::launch("group_touch: count", count_touches_kernel, grid, stream, touched, counts);
  }
  simt::launch("group_touch: touch", touch_rows_kernel, grid, stream, touched, counts);
}

}  // namespace sparsekit::cuda
