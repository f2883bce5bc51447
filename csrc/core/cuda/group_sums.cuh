// Sums the gradients of the rows of all tables in the same launches. Each distinct row has a number
// that is unique across tables. One sort by these numbers brings the entries of each row together
// and keeps the entries of a table contiguous. Then chunks are summed as in segment_reduce.cuh. The
// first chunk of each table starts at the table's first entry, so the sums have the same bits as if
// each table were summed alone.
//
// An optimizer's step does not need the gradients in memory. In that case, only rows whose entries
// span several chunks are summed in this way. For the other rows, only the positions of their
// entries are found, and the update kernel adds these entries up (RowRuns).
#pragma once

#include <cstdint>

#include "cuda/bags.cuh"
#include "cuda/descriptors.cuh"
#include "cuda/radix_sort.cuh"
#include "cuda/row_shares.cuh"
#include "cuda/segment_reduce.cuh"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::cuda {

template <class T>
struct SumFeature {
  const T* grad;
  int64_t stride;
  const Acc<T>* sample_weights;  // may be null
  const int64_t* key_start;
  int32_t table;
  int32_t first_bag;  // index of the feature's first bag among the bags of all features
  int32_t num_keys;
  int32_t combiner;
};

struct SumTable {
  int32_t dim, first_feature;
  uint16_t columns;
  uint8_t log2_lanes;
  bool wide;
};

// Both `features` and `tables` have one extra element at the end, which marks where the last
// element's ranges end.
template <class T>
struct SumGroup {
  using A = Acc<T>;

  const SumFeature<T>* features;
  const SumTable* tables;
  int32_t num_features, num_tables, num_bags, entries;
  const int32_t* index;
  const int32_t* rows;  // may be null
  const int64_t* counts;
  const int32_t* bags;
  // [num_tables + 1] totals over the preceding tables, computed by plan_sums_kernel.
  int32_t* entry;
  int64_t* row;
  int64_t* element;
  // [all rows] the element of `out` where each row's sum begins, or -1 if the sum does not fit;
  // null if sums are in row order.
  int64_t* at;
  // Scaled gradients, indexed by bag or, with sample weights, by entry; null if nothing is scaled.
  ScaledRow<A>* scaled;
  A* divisors;  // [num_bags] divisors of weighted bags; null if no such bag is divided
  bool by_entry;
  A divide_by;
  int64_t stride;  // row stride of partial sums
  // The gradient or, if `begins` is given, the [chunks, stride] array of sums_over_chunks().
  T* out;
  // [keys], or null: position of each sort key's first entry among the entries of its table.
  int32_t* begins;
  const int32_t* chunks;  // [num_tables + 1] number of chunks in the preceding tables
  int64_t* bad_index;
  bool bounded;  // true if a table's number of rows is limited to its number of entries

  SPARSEKIT_DEVICE int table_of(int64_t e) const {
    return last_up_to(e, num_tables, [this](int t) { return entry[t]; });
  }
  SPARSEKIT_DEVICE int feature_of_bag(int64_t bag) const {
    return last_up_to(bag, num_features, [this](int f) { return features[f].first_bag; });
  }
  SPARSEKIT_DEVICE int32_t first_bag(int t) const {
    return features[tables[t].first_feature].first_bag;
  }
  SPARSEKIT_DEVICE Range range(int64_t bag) const {
    return good_range(bags[bag], bags[bag + 1], entries);
  }
  // Returns the first sort key of a table. A table has one sort key for each row, followed by one
  // for all entries without a row.
  SPARSEKIT_DEVICE uint32_t key_start(int t) const { return static_cast<uint32_t>(row[t] + t); }
  SPARSEKIT_DEVICE uint32_t no_row(int t) const { return key_start(t + 1) - 1; }

  // Returns the sums of those rows of table t that span several chunks, indexed by the row's first
  // chunk. At most one such row begins in each chunk.
  SPARSEKIT_DEVICE T* sums_over_chunks(int t) const { return out + int64_t{chunks[t]} * stride; }

  SPARSEKIT_DEVICE A weight_of(const SumFeature<T>& feature, int64_t e) const {
    if (feature.sample_weights == nullptr) return A{1};
    const int64_t at = *simt::global(feature.key_start) + e - bags[feature.first_bag];
    const bool there = at >= 0 && at < feature.num_keys;
    return there ? simt::global(feature.sample_weights)[at] : A{0};
  }
};

// A level of the reduction, with room for n entries, whose rows are `stride` elements apart.
// Chunks, and the blocks that sum them, are numbered across all tables.
template <class T>
struct SumLevel : Level<T> {
  int32_t* chunks;
  int64_t* blocks;
};

template <class T>
struct SumLevels {
  static constexpr int kMost = 8;  // 6 levels if n < 2^31, plus the output of the last level

  SumLevel<T> level[kMost];
  int count;  // number of launches, one less than the number of levels
};

// Gradients of a table's bags, with the members that sum_runs requires of RowsOf.
template <class T>
struct GradientRows {
  using Scalar = T;
  const ScaledRow<Acc<T>>* scaled;
  const SumFeature<T>* features;
  int num_features;
  int64_t dim;
  // The next fields are copied from the first feature, which is usually the only one.
  const T* grad;
  int64_t stride;
  int32_t first_bag;

  SPARSEKIT_DEVICE GradientRows(const SumGroup<T>& group, int t)
      : scaled(group.scaled),
        features(group.features + group.tables[t].first_feature),
        num_features(group.tables[t + 1].first_feature - group.tables[t].first_feature),
        dim(group.tables[t].dim),
        grad(features->grad),
        stride(features->stride),
        first_bag(features->first_bag) {}

  SPARSEKIT_DEVICE ScaledRow<Acc<T>> find(int32_t value) const {
    if (value < 0) return {-1, Acc<T>{0}};
    return scaled == nullptr ? ScaledRow<Acc<T>>{value, Acc<T>{1}} : simt::global(scaled)[value];
  }
  template <int kWidth>
  SPARSEKIT_DEVICE void read(int32_t bag, int64_t element, RowPiece<T, kWidth>& piece) const {
    piece = {};
    if (bag < 0 || element >= dim) return;
    const T* from = grad + (bag - first_bag) * stride;
    if (num_features > 1) {
      const SumFeature<T>* all = simt::global(features);
      const auto first = [all](int f) { return all[f].first_bag; };
      const SumFeature<T>& own = all[last_up_to(bag, num_features, first)];
      from = own.grad + (bag - own.first_bag) * own.stride;
    }
    piece.read(simt::global(from + element));
  }
};

// Computes the gradient of a row from its sum: rounds the sum, then divides it.
template <class T>
SPARSEKIT_DEVICE T divided_sum(Acc<T> sum, Acc<T> divide_by) {
  const T rounded = store<T>(sum);
  return divide_by == Acc<T>{1} ? rounded : store<T>(load(rounded) / divide_by);
}

// Function object that returns the first entry of table t in a level: begins[t] * scale.
struct Begins {
  const int32_t* begins;
  int32_t scale;

  SPARSEKIT_DEVICE int64_t operator()(int t) const { return int64_t{begins[t]} * scale; }
};

// Writes to group.begins where the entries of each sort key of table t begin, if they begin in this
// chunk. A key without entries gets the position of the next key's entries. The key after the last
// row gets the end of all entries. The lanes of a tile divide the work.
template <class T>
SPARSEKIT_DEVICE void note_begins(const SumGroup<T>& group, const SumLevel<T>& sorted, int t,
                                  uint32_t chunk, int lane, int lanes) {
  const int64_t first = group.entry[t];
  const auto n = static_cast<uint32_t>(group.entry[t + 1] - first);
  const uint32_t key_start = group.key_start(t), no_row = group.no_row(t);
  // Returns the smallest key that is larger than the keys of all entries before k.
  const auto next_key = [&](uint32_t k) {
    const uint32_t key = k == 0 ? key_start : sorted.keys[first + k - 1] + 1;
    return key < key_start ? key_start : key;
  };
  const uint32_t begin = chunk * kChunk;
  const uint32_t end = n - begin > kChunk ? begin + kChunk : n + 1;
  for (uint32_t k = begin + lane; k < end; k += lanes) {
    const uint32_t own = k == n ? no_row : sorted.keys[first + k];
    const uint32_t last = own < no_row ? own : no_row;
    for (uint32_t key = next_key(k); key <= last; ++key) {
      group.begins[key] = static_cast<int32_t>(k);
    }
  }
}

// Sums a chunk of table t. Sums of whole runs are written to `out`, other sums to the next level.
// If kAllRows is false, group.begins is given, and the first level skips rows whose entries are all
// in a single chunk.
template <int kWidth, bool kFirst, bool kAllRows, class T, class RowsOf>
SPARSEKIT_DEVICE void sum_chunk(const SumGroup<T>& group, const SumLevel<T>& from, Begins begins,
                                const SumLevel<T>& to, int t, uint32_t chunk, int64_t element,
                                const RowsOf& rows) {
  using A = Acc<T>;
  const int64_t first = begins(t);
  const auto n = static_cast<uint32_t>(begins(t + 1) - first);
  const uint32_t begin = chunk * kChunk;
  const uint32_t end = n - begin > kChunk ? begin + kChunk : n;
  const int64_t slot = 2 * (int64_t{from.chunks[t]} + chunk);
  const uint32_t key_start = group.key_start(t), no_row = group.no_row(t);
  T* out = (kAllRows ? group.out : group.sums_over_chunks(t)) + element;
  const auto place = [&](uint32_t key) -> int64_t {
    if constexpr (!kAllRows) return group.begins[key] / static_cast<int>(kChunk) * group.stride;
    const int64_t number = key - key_start;
    if (group.at != nullptr) return group.at[group.row[t] + number];
    return group.element[t] + number * rows.dim;
  };
  // Writes zeros for rows without entries.
  const auto clear = [&](uint32_t key, uint32_t last) {
    const A zeros[kWidth] = {};
    for (; key < last && element < rows.dim; ++key) {
      const int64_t to = place(key);
      if (to >= 0) write_row(out + to, zeros);
    }
  };
  if (kFirst && n == 0) return clear(key_start, no_row);

  // Sort keys of the entries just before and just after the chunk. If a row in the chunk also has
  // entries outside the chunk, its key is one of these two.
  constexpr uint32_t kNone = ~0u;
  const uint32_t before = begin == 0 ? kNone : from.keys[first + begin - 1];
  const uint32_t after = end == n ? kNone : from.keys[first + end];
  const auto entry = [&](uint32_t k) {
    Entry found{from.keys[first + k], from.values[first + k]};
    if (found.key < key_start || found.key >= no_row) found.value = -1;
    if (kFirst && !kAllRows && found.key != before && found.key != after) found.value = -1;
    return found;
  };
  bool has_head = false, has_tail = false;
  // The smallest key that may need zeros.
  uint32_t next = begin == 0 ? key_start : before + 1;
  if (next < key_start) next = key_start;
  sum_runs<kWidth>(begin, end, n, element, rows, entry,
                   [&](Run run, uint32_t key, const A(&sum)[kWidth]) {
                     has_head = has_head || run == Run::kHead;
                     has_tail = has_tail || run == Run::kTail;
                     if (kFirst && kAllRows && run != Run::kHead) {
                       clear(next, key);
                       next = key + 1;
                     }
                     if (element >= rows.dim) return;
                     if (run != Run::kWhole) {
                       const int64_t own = slot + (run == Run::kTail ? 1 : 0);
                       return write_row(to.rows + own * group.stride + element, sum);
                     }
                     const int64_t own = place(key);
                     if (own < 0) return;
                     RowPiece<T, kWidth> piece;
                     for (int j = 0; j < kWidth; ++j) {
                       piece.at(j) = divided_sum<T>(sum[j], group.divide_by);
                     }
                     piece.write(out + own);
                   });
  if (kFirst && kAllRows && (end == n || from.keys[first + end - 1] >= no_row)) {
    clear(next, no_row);
  }
  if (element > 0) return;
  // Give a key even to slots without a sum, so that the next level's entries are sorted.
  to.keys[slot] = from.keys[first + begin];
  to.keys[slot + 1] = from.keys[first + end - 1];
  to.values[slot] = has_head ? static_cast<int32_t>(slot) : -1;
  to.values[slot + 1] = has_tail ? static_cast<int32_t>(slot + 1) : -1;
}

template <int kWidth, bool kFirst, bool kAllRows, class T>
SPARSEKIT_DEVICE void sum_chunks_of_block(const SumGroup<T>& group, const SumLevel<T>& from,
                                          Begins begins, const SumLevel<T>& to, int t,
                                          int64_t block) {
  const SumTable& table = group.tables[t];
  const int log2_lanes = table.log2_lanes;
  const int lane_in_tile = simt::thread() & ((1 << log2_lanes) - 1);
  const int64_t column = block % table.columns;
  const int64_t element = ((column << log2_lanes) + lane_in_tile) * kWidth;
  const int64_t chunk = (block / table.columns * kGroupThreads + simt::thread()) >> log2_lanes;
  if (chunk >= from.chunks[t + 1] - from.chunks[t]) return;
  const auto own = static_cast<uint32_t>(chunk);
  if constexpr (kFirst) {
    if (!kAllRows && column == 0) {
      note_begins(group, from, t, own, lane_in_tile, 1 << log2_lanes);
    }
    const GradientRows<T> rows(group, t);
    sum_chunk<kWidth, true, kAllRows>(group, from, begins, to, t, own, element, rows);
  } else {
    const Rows<Acc<T>> rows{from.rows, nullptr, table.dim, group.stride};
    sum_chunk<kWidth, false, kAllRows>(group, from, begins, to, t, own, element, rows);
  }
}

template <class T, bool kFirst, bool kAllRows>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads, kGroupBlocksAtOnce)
    sum_tables_kernel(SumGroup<T> group, SumLevel<T> from, Begins begins, SumLevel<T> to) {
  const int64_t blocks = from.blocks[group.num_tables];
  for (int64_t b = simt::block(); b < blocks; b += simt::blocks()) {
    const int t = last_up_to(b, group.num_tables, [&](int i) { return from.blocks[i]; });
    const int64_t own = b - from.blocks[t];
    if (group.tables[t].wide) {
      sum_chunks_of_block<kWide<T>, kFirst, kAllRows>(group, from, begins, to, t, own);
    } else {
      sum_chunks_of_block<1, kFirst, kAllRows>(group, from, begins, to, t, own);
    }
  }
}

// The input for computing gradients one row at a time: where the entries of each row begin, the
// values of all entries, and the sums of rows that span several chunks.
template <class T>
struct RowRuns {
  SumGroup<T> group;
  const int32_t* values;  // values of the sorted entries
};

// find_row_runs() finds the runs and stores them in `workspace`. It sends `descriptors`, which must
// have sum_descriptor_bytes() of free space, and computes the first_blocks of `shares`.
template <class T>
int64_t sum_descriptor_bytes(const GroupSums<T>& sums);
template <class T>
int64_t row_runs_workspace_bytes(const GroupSums<T>& sums);
template <class T>
RowRuns<T> find_row_runs(const GroupSums<T>& sums, Descriptors& descriptors,
                         const UpdateShares& shares, int64_t* bad_index, void* workspace,
                         void* stream);

}  // namespace sparsekit::cuda
