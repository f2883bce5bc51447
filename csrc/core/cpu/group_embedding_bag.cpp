#include "sparsekit/group_embedding_bag.h"

#include <algorithm>
#include <limits>

#include "cpu/bags.h"
#include "cpu/first_bad.h"
#include "cpu/segment_reduce.h"
#include "cpu/share_work.h"
#include "cpu/sort_rows.h"
#include "sparsekit/arena.h"
#include "sparsekit/initial_values.h"

namespace sparsekit::cpu {
namespace {

// ---- pooling ----

// Maps an entry of a feature to its row; entry 0 is the feature's first. The members are copies,
// since the compiler must assume that a store to `out` may change anything that a pointer refers
// to.
template <class T, class Index>
struct EntryRows {
  const T* weight;
  int64_t num_rows, stride;
  const Index* index;
  const int32_t* rows;  // used only if Index is int32_t
  int64_t num_listed;

  // Returns the row of entry i, -1 if the entry has no row, or num_rows if its index is invalid.
  int64_t row_number(int64_t i) const {
    int64_t row = index[i];
    if constexpr (sizeof(Index) == sizeof(*rows)) {
      if (rows != nullptr && row >= 0) row = row < num_listed ? rows[row] : num_rows;
    }
    return row;
  }
  bool is_row(int64_t row) const {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_rows);
  }
  const T* vector(int64_t row) const { return weight + row * stride; }
};

// Computes the initial vector of a key that has no row.
template <class T>
[[gnu::noinline]] const T* initial_vector(const PooledTable<T>& table, int64_t key, T* scratch) {
  Initializer initializer = table.initializer;
  initializer.seed = static_cast<uint64_t>(*table.seed);
  init_row(scratch, table.dim, key, initializer);
  return scratch;
}

// Pools the bags [begin, end) of a feature. Bag b has the entries [bounds[b], bounds[b + 1]).
template <class T, class Index>
void pool_bags(const PooledTable<T>& table, const FeatureBags<T>& bags, const Index* bounds,
               const Index* index, int64_t begin, int64_t end, T* scratch, FirstBad* bad) {
  const int64_t first_entry = bags.first_entry(), n = bags.num_entries();
  const EntryRows<T, Index> rows{table.weight,        table.num_rows, table.stride,
                                 index + first_entry, table.rows,     table.num_listed};
  const int64_t dim = table.dim, stride = bags.stride;
  const Combiner combiner = bags.combiner;
  bool has_absent = false;
  const auto row = [=, &has_absent](int64_t i) -> const T* {
    const int64_t r = rows.row_number(i);
    if (rows.is_row(r)) return rows.vector(r);
    if (r < 0) {
      has_absent = true;
    } else {
      bad->report(first_entry + i);
    }
    return nullptr;
  };
  const auto row_or_initial = [=, &table, &bags](int64_t i) -> const T* {
    const int64_t r = rows.row_number(i);
    if (rows.is_row(r)) return rows.vector(r);
    return r < 0 ? initial_vector(table, bags.key(bags.first() + i), scratch) : nullptr;
  };
  const int64_t distance = rows_ahead<T>(dim);
  const auto ahead = [=](int64_t i) {
    if (i + distance >= n) return;
    // This row has not been checked yet. Even computing an invalid row's address would be undefined
    // behavior.
    const int64_t r = rows.row_number(i + distance);
    if (rows.is_row(r)) prefetch_row(rows.vector(r), dim);
  };
  const Acc<T>* weights =
      bags.sample_weights == nullptr ? nullptr : bags.sample_weights + bags.first();
  const auto weight_of = [=](int64_t i) { return weights[i]; };
  // Pools the bag with the entries [first, last).
  const auto pool = [&](int64_t first, int64_t last, T* pooled, const auto& row_at) {
    if (combiner == Combiner::kNone) {
      if (first < last) ahead(first);
      const T* vector = first < last ? row_at(first) : nullptr;
      if (vector == nullptr) {
        std::fill_n(pooled, dim, T{});
      } else {
        std::copy_n(vector, dim, pooled);
      }
      return;
    }
    const Acc<T> total = divisor(weights, first, last, combiner);
    const auto put = [=](int64_t j, auto sum) { put_at(pooled + j, sum); };
    const auto put_divided = [=](int64_t j, auto sum) { put_at(pooled + j, divided(sum, total)); };
    if (weights == nullptr && last - first == 1) {
      ahead(first);
      const T* vector = row_at(first);
      // Add zero, as a sum does, since that turns -0 into 0.
      for (int64_t j = 0; j < dim; ++j) {
        pooled[j] = vector == nullptr ? T{} : store<T>(Acc<T>{} + load(vector[j]));
      }
    } else if (weights != nullptr) {
      sum_rows<T>(first, last, dim, row_at, weight_of, ahead, put_divided);
    } else if (total == 1) {  // skip the division, which can take longer than the sum
      sum_rows<T>(first, last, dim, row_at, NoScale{}, ahead, put);
    } else {
      sum_rows<T>(first, last, dim, row_at, NoScale{}, ahead, put_divided);
    }
  };
  T* pooled = bags.out + begin * stride;
  int64_t first = bounds[begin] - first_entry;
  for (int64_t i = first - distance; i < first; ++i) ahead(i);
  for (int64_t b = begin; b < end; ++b, pooled += stride) {
    const int64_t last = bounds[b + 1] - first_entry;
    pool(first, last, pooled, row);
    // If keys were absent, pool the bag again with their initial vectors. A single loop for both
    // cases would keep its sums in memory, which would slow down the common case.
    if (has_absent && table.seed != nullptr) pool(first, last, pooled, row_or_initial);
    has_absent = false;
    first = last;
  }
}

// ---- gradients ----

template <class T>
int64_t work_of(const SummedTable<T>& table) {
  return table.n * table.dim;
}

// Scratch memory for computing the gradient of a table.
template <class T>
struct Memory {
  RowSort sort;
  int32_t* numbers = nullptr;  // [n] index of each entry's row in sorted order
  void* sums;

  Memory(Arena& arena, const SummedTable<T>& table, const ParallelFor& parallel_for)
      : sort(arena, table.rows == nullptr ? 0 : table.num_rows) {
    if (table.rows != nullptr) numbers = arena.take<int32_t>(table.n);
    sums = arena.take<char>(0);
    SegmentWorkspace<T>(arena, table.n, table.dim, table.num_rows, nullptr, parallel_for);
  }
};

// A table whose gradient is written to the workspace in row order, for a GradientTaker.
template <class T>
struct TakenTable {
  SummedTable<T> table;
  int64_t* rows;
  void* memory;  // scratch memory for the sum

  TakenTable(Arena& arena, const SummedTable<T>& of)
      : table(of), rows(arena.take<int64_t>(of.num_rows)) {
    table.rows = nullptr;
    table.grad = arena.take<T>(of.num_rows * of.dim);
    memory = arena.take<char>(0);
  }
};

template <class T>
int64_t memory_bytes(const SummedTable<T>& table, const ParallelFor& parallel_for, bool has_taker) {
  if (!has_taker) return Arena::bytes_of<Memory<T>>(table, parallel_for);
  Arena arena;
  const TakenTable<T> taken(arena, table);
  return arena.bytes() + Arena::bytes_of<Memory<T>>(taken.table, parallel_for);
}

// Computes the gradient of one table. Returns -1 or a bad entry, like group_embedding_bag_backward.
template <class T>
int64_t sum_table(const SummedTable<T>& table, EntryNumbers all_index, int64_t divide_by,
                  void* workspace, const ParallelFor& parallel_for) {
  Arena parts(workspace);
  const Memory<T> memory(parts, table, parallel_for);
  const EntryNumbers index = all_index.from(table.first_entry);
  bool scaled = false;
  for (int64_t f = 0; f < table.num_features; ++f) {
    const FeatureBags<T>& bags = table.features[f];
    scaled |= bags.sample_weights != nullptr || bags.combiner == Combiner::kMean ||
              bags.combiner == Combiner::kSqrtn;
  }
  const auto reduce = [&](const EntryNumbers& ids, const auto& gradients) {
    return reduce_segments(ids, table.n, table.dim, table.num_rows, gradients, memory.sums,
                           table.grad, parallel_for);
  };
  const auto sum = [&](const EntryNumbers& ids) {
    if (scaled) {
      return reduce(ids,
                    BagGradients<T, true>{table.features, table.num_features, table.first_entry});
    }
    return reduce(ids,
                  BagGradients<T, false>{table.features, table.num_features, table.first_entry});
  };
  int64_t bad = -1;
  if (table.rows == nullptr) {
    bad = sum(index);
  } else {
    const int32_t* place = memory.sort.places(table.rows, table.num_rows, table.sorted_rows);
    int32_t* numbers = memory.numbers;
    const int64_t num_rows = table.num_rows;
    parallel_for(0, table.n, 65536, [=](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        // Keep an invalid index invalid: the segment sum reports it.
        const int64_t number = index[i];
        numbers[i] = static_cast<uint64_t>(number) < static_cast<uint64_t>(num_rows)
                         ? place[number]
                         : static_cast<int32_t>(number < 0 ? -1 : num_rows);
      }
    });
    bad = sum(EntryNumbers{nullptr, numbers});
  }
  if (bad >= 0) return table.first_entry + bad;
  if (divide_by != 1) {
    const auto by = static_cast<Acc<T>>(divide_by);
    T* grad = table.grad;
    parallel_for(0, table.num_rows * table.dim, kLeastWork, [=](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; ++j) grad[j] = store<T>(load(grad[j]) / by);
    });
  }
  return -1;
}

// Returns the first entry whose index is >= its table's num_rows, or -1 if there is none.
template <class T>
int64_t first_beyond(const SummedTable<T>* tables, int64_t num_tables, EntryNumbers index,
                     const ParallelFor& parallel_for) {
  FirstBad bad;
  const auto check = [&](const auto* numbers, const SummedTable<T>& table) {
    const int64_t num_rows = table.num_rows;
    parallel_for(0, table.n, 65536, [=, &bad](int64_t begin, int64_t end) {
      // Compute the maximum first: unlike a search, this loop can be vectorized.
      auto largest = std::numeric_limits<std::decay_t<decltype(*numbers)>>::min();
      for (int64_t i = begin; i < end; ++i) largest = std::max(largest, numbers[i]);
      if (largest < num_rows) return;
      const auto beyond = [=](int64_t number) { return number >= num_rows; };
      bad.report(table.first_entry +
                 (std::find_if(numbers + begin, numbers + end, beyond) - numbers));
    });
  };
  for (int64_t t = 0; t < num_tables; ++t) {
    const EntryNumbers own = index.from(tables[t].first_entry);
    own.wide != nullptr ? check(own.wide, tables[t]) : check(own.narrow, tables[t]);
  }
  return bad.position();
}

template <class T>
struct PoolWorkspace {
  int64_t* units_before;          // [num_features + 1]
  int64_t scratch_of_thread = 0;  // dim of the widest initial vector; 0 if there are none
  T* scratch;                     // [threads, scratch_of_thread]

  PoolWorkspace(Arena& arena, const PooledTable<T>* tables, const FeatureBags<T>* features,
                int64_t num_features, const ParallelFor& parallel_for)
      : units_before(arena.take<int64_t>(num_features + 1)) {
    for (int64_t f = 0; f < num_features; ++f) {
      const PooledTable<T>& table = tables[features[f].table];
      if (table.seed != nullptr) scratch_of_thread = std::max(scratch_of_thread, table.dim);
    }
    scratch = arena.take<T>(scratch_of_thread * parallel_for.num_threads());
  }
};

template <class T>
SharedJobs shared_tables(const SummedTable<T>* tables, int64_t num_tables, int32_t* order,
                         const ParallelFor& parallel_for) {
  return SharedJobs(num_tables, order, kLeastWork, parallel_for,
                    [=](int64_t t) { return work_of(tables[t]); });
}

}  // namespace

template <class T>
int64_t group_embedding_bag_workspace_bytes(const PooledTable<T>* tables,
                                            const FeatureBags<T>* features, int64_t num_features,
                                            const ParallelFor& parallel_for) {
  return Arena::bytes_of<PoolWorkspace<T>>(tables, features, num_features, parallel_for);
}

template <class T>
int64_t group_embedding_bag(const PooledTable<T>* tables, const FeatureBags<T>* features,
                            int64_t num_features, EntryNumbers index, void* workspace,
                            const ParallelFor& parallel_for) {
  Arena arena(workspace);
  const PoolWorkspace<T> work(arena, tables, features, num_features, parallel_for);
  int64_t* units_before = work.units_before;
  const auto grain = [tables, &parallel_for](const FeatureBags<T>& bags) {
    // Each unit must wait for its first rows, so make only as many units per feature as it takes
    // to balance the threads.
    const int64_t few = bags.num_bags / (4 * parallel_for.num_threads());
    return std::max(few, bag_grain(bags.num_entries(), bags.num_bags, tables[bags.table].dim));
  };
  units_before[0] = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t bags_of_unit = grain(features[f]);
    units_before[f + 1] =
        units_before[f] + (features[f].num_bags + bags_of_unit - 1) / bags_of_unit;
  }
  FirstBad bad;
  share_units(units_before, num_features, parallel_for,
              [&](int64_t f, int64_t unit, int64_t thread) {
                const FeatureBags<T>& bags = features[f];
                const PooledTable<T>& table = tables[bags.table];
                const int64_t begin = unit * grain(bags);
                const int64_t end = std::min(bags.num_bags, begin + grain(bags));
                T* own = work.scratch + thread * work.scratch_of_thread;
                const auto& [wide, narrow] = bags.bags;
                if (wide != nullptr) {  // index may be null if it has no elements
                  pool_bags(table, bags, wide, index.wide, begin, end, own, &bad);
                } else {
                  pool_bags(table, bags, narrow, index.narrow, begin, end, own, &bad);
                }
              });
  return bad.position();
}

template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>* tables,
                                                     int64_t num_tables, int32_t* order,
                                                     const ParallelFor& parallel_for,
                                                     bool has_taker) {
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  int64_t together = 0, alone = 0;
  for (int64_t place = 0; place < num_tables; ++place) {
    const SummedTable<T>& table = tables[jobs.job(place)];
    if (place < jobs.num_together()) {
      together = std::max(together, memory_bytes(table, parallel_for, has_taker));
    } else {
      alone = std::max(alone, memory_bytes(table, one_thread(), has_taker));
    }
  }
  return std::max(together, jobs.threads() * alone);
}

template <class T>
int64_t group_embedding_bag_backward(const SummedTable<T>* tables, int64_t num_tables,
                                     EntryNumbers index, int64_t divide_by, int32_t* order,
                                     void* workspace, const ParallelFor& parallel_for,
                                     const GradientTaker<T>* taker) {
  if (taker != nullptr) {
    const int64_t bad = first_beyond(tables, num_tables, index, parallel_for);
    if (bad >= 0) return bad;
  }
  const SharedJobs jobs = shared_tables(tables, num_tables, order, parallel_for);
  int64_t alone = 0;
  for (int64_t place = jobs.num_together(); place < num_tables; ++place) {
    alone = std::max(alone, memory_bytes(tables[jobs.job(place)], one_thread(), taker != nullptr));
  }
  FirstBad bad;
  const auto sum = [&](int64_t t, void* memory, const ParallelFor& own) {
    if (taker == nullptr) {
      const int64_t entry = sum_table(tables[t], index, divide_by, memory, own);
      if (entry >= 0) bad.report(entry);
      return;
    }
    Arena parts(memory);
    const TakenTable<T> taken(parts, tables[t]);
    sum_table(taken.table, index, divide_by, taken.memory, own);
    std::copy_n(tables[t].rows, tables[t].num_rows, taken.rows);
    (*taker)(t, taken.rows, taken.table.grad, own);
  };
  jobs.run([&](int64_t t) { sum(t, workspace, parallel_for); },
           [&](int64_t t, int64_t thread) {
             sum(t, static_cast<char*>(workspace) + thread * alone, one_thread());
           });
  return bad.position();
}

SPARSEKIT_INSTANTIATE(group_embedding_bag_workspace_bytes)
SPARSEKIT_INSTANTIATE(group_embedding_bag)
SPARSEKIT_INSTANTIATE(group_embedding_bag_backward_workspace_bytes)
SPARSEKIT_INSTANTIATE(group_embedding_bag_backward)

}  // namespace sparsekit::cpu
