#include "sparsekit/group_touch.h"

#include <algorithm>

#include "cpu/probe.h"
#include "cpu/share_work.h"

namespace sparsekit::cpu {
namespace {

// Minimum number of entries per thread.
constexpr int64_t kWorth = 8192;

// Number of rows whose scores are asked for ahead of their use.
constexpr int64_t kAhead = 16;

bool has_scores(const TouchedTable& table) {
  return table.policy != ScorePolicy::kNone && table.capacity > 0;
}

// Returns the number of words of workspace: a count for each distinct key.
int64_t num_counts(const TouchedTable& table) {
  return has_scores(table) && table.policy == ScorePolicy::kLfu ? table.num_distinct : 0;
}

SharedJobs shared_tables(const TouchedTable* tables, int64_t num_tables, int32_t* order,
                         const ParallelFor& parallel_for) {
  return SharedJobs(num_tables, order, kWorth, parallel_for, [=](int64_t t) {
    return has_scores(tables[t]) ? tables[t].n : int64_t{0};
  });
}

// Calls write(j, score) for the distinct rows [begin, end) of a table that have a score.
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

// Adds the touches of the entries [begin, end) of a table to the counts of their keys. If
// `is_shared`, other threads add to the same counts.
template <bool kIsShared>
void count_touches(const TouchedTable& table, const FoundRows& found, int64_t begin, int64_t end,
                   uint64_t* counts) {
  const auto num_distinct = static_cast<uint64_t>(table.num_distinct);
  const auto count = [&](int64_t e, uint64_t touches) {
    const auto number = static_cast<uint64_t>(int64_t{found.index[e]});
    if (number >= num_distinct) return;
    if constexpr (kIsShared) {
      __atomic_fetch_add(counts + number, touches, __ATOMIC_RELAXED);
    } else {
      counts[number] += touches;
    }
  };
  const int64_t first = table.first_entry;
  for (int64_t e = first + begin; e < first + end; ++e) {
    count(e, touches_of(found.occurrences, e));
  }
}

// Writes the scores of a table on the threads of `parallel_for`.
void touch_table(const TouchedTable& table, const FoundRows& found, uint64_t* counts,
                 bool is_shared, const ParallelFor& parallel_for) {
  if (!has_scores(table)) return;
  const int32_t* rows = found.rows + table.first_entry;
  const int64_t n = table.num_distinct;
  if (table.policy == ScorePolicy::kLru) {
    const int64_t clock = *table.clock;
    return parallel_for(0, n, kWorth, [=, &table](int64_t begin, int64_t end) {
      each_score(table, rows, begin, end, [=](int64_t, int64_t* score) { *score = clock; });
    });
  }
  std::fill_n(counts, n, uint64_t{0});
  parallel_for(0, table.n, kWorth, [&](int64_t begin, int64_t end) {
    if (is_shared) {
      count_touches<true>(table, found, begin, end, counts);
    } else {
      count_touches<false>(table, found, begin, end, counts);
    }
  });
  const LfuClock clock(*table.clock, table.halve_every);
  parallel_for(0, n, kWorth, [&](int64_t begin, int64_t end) {
    each_score(table, rows, begin, end,
               [=](int64_t j, int64_t* score) { *score = clock.add(*score, counts[j]); });
  });
}

// Number of words of workspace of a thread that has small tables.
int64_t num_counts_alone(const SharedJobs& jobs, const TouchedTable* tables, int64_t num_tables) {
  int64_t most = 0;
  for (int64_t place = jobs.num_together(); place < num_tables; ++place) {
    most = std::max(most, num_counts(tables[jobs.job(place)]));
  }
  constexpr int64_t kOfLine = 64 / sizeof(uint64_t);  // threads must not share lines
  return (most + kOfLine - 1) / kOfLine * kOfLine;
}

}  // namespace

int64_t group_touch_workspace_bytes(const TouchedTable* tables, int64_t num_tables, int32_t* order,
                                    const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  int64_t words = jobs.threads() * num_counts_alone(jobs, tables, num_tables);
  for (int64_t place = 0; place < jobs.num_together(); ++place) {
    words = std::max(words, num_counts(tables[jobs.job(place)]));
  }
  return words * static_cast<int64_t>(sizeof(uint64_t));
}

void group_touch(const TouchedTable* tables, int64_t num_tables, const FoundRows& found,
                 int32_t* order, void* workspace, const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  auto* counts = static_cast<uint64_t*>(workspace);
  const int64_t alone = num_counts_alone(jobs, tables, num_tables);
  jobs.run([&](int64_t t) { touch_table(tables[t], found, counts, true, parallel_for); },
           [&](int64_t t, int64_t thread) {
             touch_table(tables[t], found, counts + thread * alone, false, one_thread());
           });
}

}  // namespace sparsekit::cpu
