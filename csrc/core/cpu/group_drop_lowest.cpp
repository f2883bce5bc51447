#include "sparsekit/group_drop_lowest.h"

#include <algorithm>

#include "cpu/probe.h"
#include "cpu/share_work.h"
#include "sparsekit/arena.h"

namespace sparsekit::cpu {
namespace {

// Minimum number of table rows per thread.
constexpr int64_t kWorth = 1 << 15;
// Prefetch distance for home buckets, in keys.
constexpr int64_t kAhead = 16;

SharedJobs shared_tables(const DroppingTable* tables, int64_t num_tables, int32_t* order,
                         const ParallelFor& parallel_for) {
  return {num_tables, order, kWorth, parallel_for, [tables](int64_t t) { return *tables[t].size; }};
}

struct Work {
  int64_t most;  // number of rows that can be dropped
  int64_t* pinned;
  LowestRows lowest;  // [most] in each
  int32_t* new_rows;  // [most] new rows of the last rows
  uint64_t* gone;     // a bit for each row
  void* memory;       // of lowest_rows()

  Work(Arena& arena, const DroppingTable& table)
      : most(std::min(table.count, *table.size)),
        pinned(arena.take<int64_t>(num_pinned(table))),
        lowest{arena.take<int64_t>(most), arena.take<int64_t>(most), arena.take<int64_t>(most),
               arena.take<int64_t>(most)},
        new_rows(arena.take<int32_t>(most)),
        gone(arena.take<uint64_t>((*table.size + 63) / 64)),
        memory(arena.take<char>(lowest_rows_workspace_bytes(*table.size))) {}

  static int64_t num_pinned(const DroppingTable& table) {
    int64_t n = 0;
    for (int64_t k = 0; k < table.num_pinned; ++k) n += table.lists[k].n;
    return n;
  }

  bool goes(int64_t row) const { return (gone[row / 64] >> (row % 64) & 1) != 0; }
};

int64_t workspace_bytes(const DroppingTable& table) {
  return table.count <= 0 ? 0 : Arena::bytes_of<Work>(table);
}

// Returns the largest workspace, in bytes, that any table in order[begin : end] needs.
int64_t most_bytes(const DroppingTable* tables, const SharedJobs& jobs, int64_t begin,
                   int64_t end) {
  int64_t most = 0;
  for (int64_t place = begin; place < end; ++place) {
    most = std::max(most, workspace_bytes(tables[jobs.job(place)]));
  }
  return most;
}

int64_t find_lowest(const DroppingTable& table, const Work& work, const ParallelFor& parallel_for) {
  int64_t* end = work.pinned;
  for (int64_t k = 0; k < table.num_pinned; ++k) {
    end = std::copy_n(table.lists[k].rows, table.lists[k].n, end);
  }
  const ScoredRows scored{table.scores(),    *table.size,   table.policy,      table.halve_every,
                          table.now,         table.buckets, table.num_buckets, work.pinned,
                          end - work.pinned, work.most};
  return lowest_rows(scored, work.lowest, work.memory, parallel_for);
}

// Finds the slot that holds this key and row, and calls use(bucket, slot). Does nothing if there is
// no such slot, which happens only in a damaged table.
template <class Use>
void with_slot(const DroppingTable& table, int64_t key, int64_t row, const Use& use) {
  int64_t b = home_bucket(key, table.hash_seed, table.num_buckets);
  for (int64_t step = 0; step < table.num_buckets; ++step) {
    const Bucket& bucket = table.buckets[b];
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      if (bucket.rows[slot] == row && bucket.keys[slot] == key) return use(b, slot);
    }
    if (!bucket.passed()) return;
    b = next_bucket(b, table.num_buckets);
  }
}

// Empties a slot, and moves up the used slots after it, since used slots come first.
void empty_slot(const DroppingTable& table, int64_t key, int64_t b, int slot) {
  const int64_t home = home_bucket(key, table.hash_seed, table.num_buckets);
  for (int64_t passed = home; passed != b; passed = next_bucket(passed, table.num_buckets)) {
    --table.buckets[passed].spilled;
  }
  Bucket& bucket = table.buckets[b];
  for (; slot + 1 < kSlotsPerBucket && bucket.rows[slot + 1] >= 0; ++slot) {
    bucket.keys[slot] = bucket.keys[slot + 1];
    bucket.rows[slot] = bucket.rows[slot + 1];
  }
  bucket.keys[slot] = 0;
  bucket.rows[slot] = -1;
}

// Calls use(i) for i in [0, n), after prefetching the home bucket of keys[i].
template <class Use>
void each_key(const DroppingTable& table, const int64_t* keys, int64_t n, const Use& use) {
  for (int64_t i = -kAhead; i < n; ++i) {
    if (i + kAhead < n) {
      prefetch(table.buckets + home_bucket(keys[i + kAhead], table.hash_seed, table.num_buckets));
    }
    if (i >= 0) use(i);
  }
}

// Drops rows from a table, and returns how many.
int64_t drop(const DroppingTable& table, void* workspace, const ParallelFor& parallel_for) {
  if (table.count <= 0) return 0;
  Arena arena(workspace);
  const Work work(arena, table);
  const int64_t n = find_lowest(table, work, parallel_for);
  if (n == 0) return 0;
  const int64_t size = *table.size, left = size - n;
  const int64_t* const gone = work.lowest.rows;
  std::fill_n(work.gone, (size + 63) / 64, uint64_t{0});
  for (int64_t k = 0; k < n; ++k) work.gone[gone[k] / 64] |= uint64_t{1} << (gone[k] % 64);
  // Move the kept rows at the end, in order, to the places of the dropped rows.
  const int64_t* place = gone;
  for (int64_t row = left; row < size; ++row) {
    work.new_rows[row - left] = work.goes(row) ? -1 : static_cast<int32_t>(*place++);
  }
  const int64_t* const keys = work.lowest.keys;
  each_key(table, keys, n, [&](int64_t k) {
    with_slot(table, keys[k], gone[k],
              [&](int64_t b, int slot) { empty_slot(table, keys[k], b, slot); });
  });
  const int64_t* const last_keys = work.lowest.last_keys + (work.most - n);
  each_key(table, last_keys, n, [&](int64_t k) {
    if (work.new_rows[k] < 0) return;
    with_slot(table, last_keys[k], left + k,
              [&](int64_t b, int slot) { table.buckets[b].rows[slot] = work.new_rows[k]; });
  });
  move_rows(table.tensors, table.num_tensors, work.new_rows, left, size, parallel_for);
  for (int64_t k = 0; k < table.num_lists; ++k) {
    const RowList& list = table.lists[k];
    bool loses = false;
    for (int64_t i = 0; i < list.n; ++i) {
      const int64_t row = list.rows[i];
      if (row < 0 || row >= size) continue;
      const bool goes = work.goes(row);
      if (goes || row >= left) list.rows[i] = goes ? -1 : work.new_rows[row - left];
      loses |= goes;
    }
    *list.lost = loses;
  }
  *table.size = left;
  return n;
}

}  // namespace

int64_t group_drop_lowest_workspace_bytes(const DroppingTable* tables, int64_t num_tables,
                                          int32_t* order, const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  return std::max(most_bytes(tables, jobs, 0, jobs.num_together()),
                  jobs.threads() * most_bytes(tables, jobs, jobs.num_together(), num_tables));
}

void group_drop_lowest(const DroppingTable* tables, int64_t num_tables, int64_t* dropped,
                       int32_t* order, void* workspace, const ParallelFor& parallel_for) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  const int64_t alone = most_bytes(tables, jobs, jobs.num_together(), num_tables);
  jobs.run([&](int64_t t) { dropped[t] = drop(tables[t], workspace, parallel_for); },
           [&](int64_t t, int64_t thread) {
             char* const own = static_cast<char*>(workspace) + thread * alone;
             dropped[t] = drop(tables[t], own, one_thread());
           });
}

}  // namespace sparsekit::cpu
