// Writes the scores of the rows touched by a lookup in many tables.
#include "sparsekit/group_touch.h"

#include <algorithm>

#include "cuda/descriptors.cuh"

namespace sparsekit::cuda {
namespace {

SPARSEKIT_DEVICE int64_t clamped(int64_t at, int64_t end) {
  return at < 0 ? 0 : at > end ? end : at;
}

// The tables with scores, and the results of the lookup.
struct Touched {
  const TouchedTable* tables;
  int32_t num_tables;
  FoundRows found;

  struct Entries {
    int64_t first, n, num_distinct;
  };

  SPARSEKIT_DEVICE int64_t first_entry(int t) const { return found.bags[tables[t].first_bag]; }

  // Returns the table of entry e; if that table has no scores, returns some other table.
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
  // Returns the address of a row's score, or null if the table has no such row.
  SPARSEKIT_DEVICE int64_t* score(int t, int64_t row) const {
    const TouchedTable& table = tables[t];
    return row < 0 || row >= table.capacity ? nullptr : simt::global(table.scores) + row;
  }
};

// Writes the scores of all distinct rows as of the advanced clocks. LRU scores are then final; LFU
// scores still lack the new touches.
SPARSEKIT_KERNEL touch_rows_kernel(Touched touched) {
  const FoundRows& found = touched.found;
  for (int64_t e = simt::global_thread(); e < found.entries; e += simt::global_threads()) {
    const int t = touched.table_of(e);
    const auto [first, n, num_distinct] = touched.entries_of(t);
    if (e < first || e >= first + num_distinct) continue;
    int64_t* score = touched.score(t, found.rows[e]);
    if (score == nullptr) continue;
    const TouchedTable& table = touched.tables[t];
    const int64_t clock = *simt::global(table.clock) + table.ticks;
    *score = table.policy == ScorePolicy::kLfu ? LfuClock(clock, table.halve_every).add(*score, 0)
                                               : clock;
  }
}

// Adds touches to the count in an LFU word. The result does not depend on the order of the
// additions: if one of them overflows, its thread then sets the count to the maximum, and any
// further addition overflows again.
SPARSEKIT_DEVICE void add_touches(int64_t* score, uint64_t touches) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the count is the second half");
  auto* count = reinterpret_cast<uint32_t*>(score) + 1;
  const uint64_t before = simt::atomic_add(count, static_cast<uint32_t>(touches));
  if (before + touches > LfuClock::kMostTouches) {
    simt::atomic_or(count, static_cast<uint32_t>(LfuClock::kMostTouches));
  }
}

// Advances the clocks, with one thread per table, after the scores have been written.
SPARSEKIT_DEVICE void advance_clocks(const Touched& touched) {
  const int64_t t = simt::global_thread();
  if (t >= touched.num_tables) return;
  const TouchedTable& table = touched.tables[t];
  *simt::global(table.clock) += table.ticks;
}

SPARSEKIT_KERNEL advance_clocks_kernel(Touched touched) {
  advance_clocks(touched);
}

// Adds each entry's touches to its row, for LFU.
SPARSEKIT_KERNEL add_touches_kernel(Touched touched) {
  advance_clocks(touched);
  const FoundRows& found = touched.found;
  // All lanes of a warp iterate together, since they compare their rows.
  for (int64_t begin = simt::global_thread() - simt::lane(); begin < found.entries;
       begin += simt::global_threads()) {
    const int64_t e = begin + simt::lane();
    int64_t* score = nullptr;
    if (e < found.entries) {
      const int t = touched.table_of(e);
      const auto [first, n, num_distinct] = touched.entries_of(t);
      const bool is_counted = touched.tables[t].policy == ScorePolicy::kLfu;
      const int64_t number = is_counted && e >= first && e < first + n ? found.index[e] : -1;
      if (number >= 0 && number < num_distinct) {
        score = touched.score(t, found.rows[first + number]);
      }
    }
    if (found.occurrences != nullptr) {
      if (score != nullptr) add_touches(score, found.touches(e));
      continue;
    }
    // One lane adds the touches of all lanes with the same row.
    const uint32_t same = simt::warp_match(simt::to_number(score));
    if (score != nullptr && simt::lowest_bit(same) == simt::lane()) {
      add_touches(score, static_cast<uint64_t>(simt::count_bits(same)));
    }
  }
}

}  // namespace

void group_touch(const TouchedTable* tables, const TouchedTable* on_device, int64_t num_tables,
                 const FoundRows& found, void* stream) {
  const Touched touched{on_device, static_cast<int32_t>(num_tables), found};
  const auto has = [=](auto is) { return std::any_of(tables, tables + num_tables, is); };
  const auto grid = [](int64_t n) { return simt::strided_grid_for(n, kGroupThreads); };
  if (found.entries > 0) {
    simt::launch("group_touch: rows", touch_rows_kernel, grid(found.entries), stream, touched);
  }
  if (found.entries > 0 && has([](const auto& x) { return x.policy == ScorePolicy::kLfu; })) {
    simt::launch("group_touch: add", add_touches_kernel, grid(std::max(found.entries, num_tables)),
                 stream, touched);
  } else if (has([](const auto& x) { return x.ticks != 0; })) {
    simt::launch("group_touch: clocks", advance_clocks_kernel,
                 simt::grid_for(num_tables, kGroupThreads), stream, touched);
  }
}

}  // namespace sparsekit::cuda
