// Finds each table's distinct keys in a call on many tables, in order of first occurrence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "cpu/distinct_key_map.h"
#include "cpu/share_work.h"
#include "sparsekit/arena.h"
#include "sparsekit/group.h"
#include "sparsekit/unique.h"

namespace sparsekit::cpu {

// Calls use(keys, begin, end), where `keys` points to the source's keys, int64_t or int32_t.
template <class Use>
void with_keys(const Source& source, int64_t begin, int64_t end, const Use& use) {
  if (source.wide_keys) {
    use(static_cast<const int64_t*>(source.keys), begin, end);
  } else {
    use(static_cast<const int32_t*>(source.keys), begin, end);
  }
}

// The distinct keys of each table in a call. The type Table has the members first_feature,
// features, first_entry and n. Large tables are handled by all threads, one after another; each
// small table is handled by one thread.
template <class Table>
class DistinctKeys {
 public:
  const Table* tables;
  int64_t num_tables;
  // The following fields are not used by workspace_bytes().
  const Source* sources = nullptr;
  const Feature* features = nullptr;
  int64_t seed = 0;            // see unique()
  int32_t* inverse = nullptr;  // [entries] index of each entry's key in its table
  int64_t* counts = nullptr;   // [num_tables] number of distinct keys
  bool distinct = true;        // if false, every entry counts as a distinct key

  // Returns the size in bytes of the workspace that each() needs. The workspace must be 64-byte
  // aligned. Pass the same buffer `order` [num_tables] to both functions.
  int64_t workspace_bytes(int32_t* order, const ParallelFor& parallel_for) const {
    const SharedJobs jobs = shared(order, parallel_for);
    int64_t together = 0, alone = 0;
    for (int64_t place = 0; place < num_tables; ++place) {
      int64_t& most = place < jobs.num_together() ? together : alone;
      most = std::max(most, tables[jobs.job(place)].n);
    }
    return std::max(together > 0 ? Arena::bytes_of<Memory>(together, false) : 0,
                    alone > 0 ? jobs.threads() * Arena::bytes_of<Memory>(alone, true) : 0);
  }

  // Numbers the keys of each table t, then calls then(t, keys, scratch, parallel_for) with the
  // table's distinct keys and a buffer scratch [n]. This `parallel_for` uses only the threads that
  // `then` may use. A table without entries gets the count 0, and `then` is not called for it.
  template <class Then>
  void each(int32_t* order, void* workspace, const ParallelFor& parallel_for,
            const Then& then) const {
    const SharedJobs jobs = shared(order, parallel_for);
    int64_t alone_n = 0;
    for (int64_t place = jobs.num_together(); place < num_tables; ++place) {
      alone_n = std::max(alone_n, tables[jobs.job(place)].n);
    }
    const int64_t bytes = Arena::bytes_of<Memory>(alone_n, true);
    jobs.run([&](int64_t t) { together(t, workspace, parallel_for, then); },
             [&](int64_t t, int64_t thread) {
               counts[t] = 0;
               if (tables[t].n == 0) return;
               alone(t, static_cast<char*>(workspace) + thread * bytes, then);
             });
  }

 private:
  // Minimum number of keys per thread.
  static constexpr int64_t kWorth = 8192;

  // Buffers for n entries of one table. `alone` is true if one thread handles the table; it
  // determines which arrays are allocated.
  struct Memory {
    int64_t* keys;     // [n] distinct keys
    int64_t* scratch;  // [n]
    Distinct<int64_t>* distinct = nullptr;
    uint32_t* entries = nullptr;
    int64_t* given = nullptr;  // [n] keys of the table, in order of entries
    void* unique = nullptr;

    Memory(Arena& arena, int64_t n, bool alone)
        : keys(arena.take<int64_t>(n)), scratch(arena.take<int64_t>(n)) {
      if (alone) {
        distinct = arena.take<Distinct<int64_t>>(n);
        entries = arena.take<uint32_t>(DistinctKeyMap<int64_t>::entries_for(n));
      } else {
        given = arena.take<int64_t>(n);
        unique = arena.take<char>(unique_workspace_bytes(n));
      }
    }
  };

  SharedJobs shared(int32_t* order, const ParallelFor& parallel_for) const {
    return SharedJobs(num_tables, order, kWorth, parallel_for,
                      [this](int64_t t) { return tables[t].n; });
  }

  template <class Use>
  void each_feature(const Table& table, const Use& use) const {
    for (int64_t f = 0; f < table.features; ++f) {
      const Feature& feature = features[table.first_feature + f];
      with_keys(sources[feature.source], feature.key_start, feature.key_start + feature.n,
                [&](auto keys, int64_t begin, int64_t end) { use(feature, keys, begin, end); });
    }
  }

  void as_given(int64_t t, int64_t* to) const {
    const Table& table = tables[t];
    counts[t] = table.n;
    each_feature(table, [&](const Feature& feature, auto keys, int64_t begin, int64_t end) {
      std::copy(keys + begin, keys + end, to + (feature.first_entry - table.first_entry));
    });
    std::iota(inverse + table.first_entry, inverse + table.first_entry + table.n, 0);
  }

  // Handles a table on one thread.
  template <class Then>
  void alone(int64_t t, void* workspace, const Then& then) const {
    const Table& table = tables[t];
    Arena parts(workspace);
    const Memory memory(parts, table.n, true);
    if (!distinct) {
      as_given(t, memory.keys);
      return then(t, memory.keys, memory.scratch, one_thread());
    }
    DistinctKeyMap<int64_t> numbering(memory.distinct, table.n, memory.entries, seed);
    each_feature(table, [&](const Feature& feature, auto keys, int64_t begin, int64_t end) {
      int32_t* to = inverse + feature.first_entry;
      numbering.add(keys, begin, end, [=](int64_t i, uint32_t number) {
        to[i - begin] = static_cast<int32_t>(number & ~kFirst);
      });
    });
    counts[t] = numbering.size();
    for (int64_t j = 0; j < counts[t]; ++j) memory.keys[j] = memory.distinct[j].key;
    then(t, memory.keys, memory.scratch, one_thread());
  }

  // Handles a table on all threads.
  template <class Then>
  void together(int64_t t, void* workspace, const ParallelFor& parallel_for,
                const Then& then) const {
    const Table& table = tables[t];
    Arena parts(workspace);
    const Memory memory(parts, table.n, false);
    if (!distinct) {
      as_given(t, memory.keys);
      return then(t, memory.keys, memory.scratch, parallel_for);
    }
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
    then(t, memory.keys, memory.scratch, parallel_for);
  }
};

}  // namespace sparsekit::cpu
