#include "sparsekit/group_touch.h"

#include <algorithm>

#include "cpu/probe.h"
#include "cpu/share_work.h"

namespace sparsekit::cpu {
namespace {

// Minimum number of entries per thread.
constexpr int64_t kWorth = 8192;

// Prefetch distance for scores, in rows.
constexpr int64_t kAhead = 64;

struct Entries {
  int64_t first, n, num_distinct;

  Entries(const TouchedTable& table, const FoundRows& found)
      : first(found.bags[table.first_bag]),
        n(found.bags[table.first_bag + table.bags] - first),
        num_distinct(found.counts[table.table]) {}
};

// Returns the workspace size in words: one count per distinct key.
int64_t num_counts(const TouchedTable& table, const FoundRows& found) {
  return table.policy == ScorePolicy::kLfu ? Entries(table, found).num_distinct : 0;
}

SharedJobs shared_tables(const TouchedTable* tables, int64_t num_tables, const FoundRows& found,
                         int32_t* order, const ParallelFor& parallel_for) {
  return SharedJobs(num_tables, order, kWorth, parallel_for,
                    [=](int64_t t) { return Entries(tables[t], found).n; });
}

// Calls write(j, score) for each of a table's distinct rows [begin, end) that has a score.
template <class Write>
void each_score(const TouchedTable& table, const int32_t* rows, int64_t begin, int64_t end,
                const Write& write) {
  int64_t* const scores = table.scores;
  const auto capacity = static_cast<uint64_t>(table.capacity);
  const auto has = [=](int64_t j) { return static_cast<uint64_t>(int64_t{rows[j]}) < capacity; };
  const int64_t first = std::min(begin + kAhead, end);
  for (int64_t j = begin; j < first; ++j) {
    if (has(j)) prefetch(scores + rows[j]);
  }
  for (int64_t j = begin; j < end; ++j) {
    if (j + kAhead < end && has(j + kAhead)) prefetch(scores + rows[j + kAhead]);
    if (has(j)) write(j, scores + rows[j]);
  }
}

// Adds the touches of the entries [begin, end) to the counts of their keys. With kShared, other
// threads add to the same counts.
template <bool kShared>
void count_touches(const FoundRows& found, int64_t num_distinct, int64_t begin, int64_t end,
                   uint64_t* counts) {
  for (int64_t e = begin; e < end; ++e) {
    const int64_t number = found.index[e];
    if (static_cast<uint64_t>(number) >= static_cast<uint64_t>(num_distinct)) continue;
    if constexpr (kShared) {
      __atomic_fetch_add(counts + number, found.touches(e), __ATOMIC_RELAXED);
    } else {
      counts[number] += found.touches(e);
    }
  }
}

// Writes a table's scores. counts [num_distinct] is workspace. Without kShared, `parallel_for`
// must use one thread.
template <bool kShared>
void touch_table(const TouchedTable& table, const FoundRows& found, uint64_t* counts,
                 const ParallelFor& parallel_for) {
  const auto [first, n, num_distinct] = Entries(table, found);
  const int32_t* rows = found.rows + first;
  if (table.policy == ScorePolicy::kLru) {
    const int64_t clock = *table.clock;
    return parallel_for(0, num_distinct, kWorth, [=, &table](int64_t begin, int64_t end) {
      each_score(table, rows, begin, end, [=](int64_t, int64_t* score) { *score = clock; });
    });
  }
  std::fill_n(counts, num_distinct, uint64_t{0});
  parallel_for(first, first + n, kWorth,
               [&found, counts, num_distinct = num_distinct](int64_t begin, int64_t end) {
                 count_touches<kShared>(found, num_distinct, begin, end, counts);
               });
  const LfuClock clock(*table.clock, table.halve_every);
  parallel_for(0, num_distinct, kWorth, [=, &table](int64_t begin, int64_t end) {
    each_score(table, rows, begin, end,
               [=](int64_t j, int64_t* score) { *score = clock.add(*score, counts[j]); });
  });
}

// Returns the workspace size, in words, for a thread that handles small tables.
int64_t num_counts_alone(const SharedJobs& jobs, const TouchedTable* tables, int64_t num_tables,
                         const FoundRows& found) {
  int64_t most = 0;
  for (int64_t place = jobs.num_together(); place < num_tables; ++place) {
    most = std::max(most, num_counts(tables[jobs.job(place)], found));
  }
  constexpr int64_t kOfLine = 64 / sizeof(uint64_t);  // threads should not share lines
  return (most + kOfLine - 1) / kOfLine * kOfLine;
}

}  // namespace

int64_t group_touch_workspace_bytes(const TouchedTable* tables, int64_t num_tables,
                                    const FoundRows& found, int32_t* order,
                                    const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, found, order, parallel_for);
  int64_t words = jobs.threads() * num_counts_alone(jobs, tables, num_tables, found);
  for (int64_t place = 0; place < jobs.num_together(); ++place) {
    words = std::max(words, num_counts(tables[jobs.job(place)], found));
  }
  return words * static_cast<int64_t>(sizeof(uint64_t));
}

void group_touch(const TouchedTable* tables, int64_t num_tables, const FoundRows& found,
                 int32_t* order, void* workspace, const ParallelFor& parallel_for) {
  for (int64_t t = 0; t < num_tables; ++t) *tables[t].clock += tables[t].ticks;
  const SharedJobs jobs = shared_tables(tables, num_tables, found, order, parallel_for);
  auto* counts = static_cast<uint64_t*>(workspace);
  const int64_t alone = num_counts_alone(jobs, tables, num_tables, found);
  jobs.run([&](int64_t t) { touch_table<true>(tables[t], found, counts, parallel_for); },
           [&](int64_t t, int64_t thread) {
             touch_table<false>(tables[t], found, counts + thread * alone, one_thread());
           });
}

}  // namespace sparsekit::cpu
