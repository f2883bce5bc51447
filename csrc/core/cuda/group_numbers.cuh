// Prepares sums of many tables: finds where the entries, rows and chunks of each table begin, which
// row each entry is added to, and the order of the rows.
#pragma once

#include "cuda/group_sums.cuh"

namespace sparsekit::cuda {

SPARSEKIT_DEVICE int32_t clamped(int32_t at, int32_t end) {
  return at < 0 ? 0 : at > end ? end : at;
}

// Computes, in a single block, where the entries, rows and chunks of each table begin, and which
// blocks of an update handle the table's rows. Also prepares the sort.
template <class T, class Words>
SPARSEKIT_KERNEL plan_sums_kernel(SPARSEKIT_GRID_CONSTANT(Words) parcel, SumGroup<T> group,
                                  SumLevels<T> levels, UpdateShares shares, RadixSort sort) {
  parcel.unpack();
  sort.zero_counts();
  const auto entries_before = [&](int t) {
    return clamped(group.bags[group.first_bag(t)], group.entries);
  };
  // Make start positions ascending even if bags are bad, so that tables do not share entries.
  sum_up(
      group.num_tables,
      [&](int t) {
        const int32_t n = entries_before(t + 1) - entries_before(t);
        return n < 0 ? 0 : n;
      },
      [&](int t, int64_t before) {
        group.entry[t] = static_cast<int32_t>(before < group.entries ? before : group.entries);
      });
  simt::barrier();
  const auto num_entries = [&](int t) { return int64_t{group.entry[t + 1]} - group.entry[t]; };
  const auto num_rows = [&](int t) {
    const int64_t count = group.counts[t] < 0 ? 0 : group.counts[t];
    const int64_t most = num_entries(t);
    return group.bounded && count > most ? most : count;
  };
  sum_up(group.num_tables, num_rows, [&](int t, int64_t before) { group.row[t] = before; });
  const auto elements = [&](int t) {
    return (num_rows(t) * group.tables[t].dim + kPartElements - 1) / kPartElements * kPartElements;
  };
  sum_up(group.num_tables, elements, [&](int t, int64_t before) { group.element[t] = before; });
  for (int i = 0; i < levels.count; ++i) {
    const auto chunks = [&](int t) {
      int64_t n = num_entries(t);
      // A table without entries also needs a chunk if it has rows to clear.
      int64_t count = n == 0 && num_rows(t) > 0 ? 1 : (n + kChunk - 1) / kChunk;
      for (int j = 0; j < i; ++j) count = count <= 1 ? 0 : (2 * count + kChunk - 1) / kChunk;
      return count;
    };
    const auto blocks = [&](int t) {
      const SumTable& table = group.tables[t];
      const int64_t threads = chunks(t) << table.log2_lanes;
      return (threads + kGroupThreads - 1) / kGroupThreads * table.columns;
    };
    const SumLevel<T>& level = levels.level[i];
    sum_up(group.num_tables, chunks,
           [&](int t, int64_t before) { level.chunks[t] = static_cast<int32_t>(before); });
    sum_up(group.num_tables, blocks, [&](int t, int64_t before) { level.blocks[t] = before; });
  }
  share_out_blocks(shares.wide, num_rows);
  share_out_blocks(shares.narrow, num_rows);
}

// Computes divisors of weighted bags. Each warp handles one bag.
template <class T>
SPARSEKIT_KERNEL group_divisors_kernel(SumGroup<T> group) {
  using A = Acc<T>;
  const int64_t bag = simt::global_thread() / simt::kWarp;
  if (bag >= group.num_bags) return;
  const SumFeature<T>& feature = group.features[group.feature_of_bag(bag)];
  const auto combiner = static_cast<Combiner>(feature.combiner);
  const Range range = group.range(bag);
  A total = 0;
  for (int64_t e = range.begin + simt::lane(); e < range.end; e += simt::kWarp) {
    total += in_total(group.weight_of(feature, e), combiner);
  }
  for (int step = simt::kWarp / 2; step > 0; step /= 2) {
    total += simt::warp_shuffle(total, simt::lane() ^ step);
  }
  if (simt::lane() == 0) group.divisors[bag] = divisor(total, range.end - range.begin, combiner);
}

// Returns the bag of table t that contains entry e, or -1 if there is none. With bad bags, several
// bags may contain the entry; the result is then any of these bags, or -1.
template <class T>
SPARSEKIT_DEVICE int32_t bag_of_entry(const SumGroup<T>& group, int t, int64_t e) {
  const int32_t first = group.first_bag(t), count = group.first_bag(t + 1) - first;
  if (count == 0) return -1;
  const int bag = first + last_up_to(e, count, [&](int b) { return group.bags[first + b]; });
  const Range range = group.range(bag);
  return range.begin <= e && e < range.end ? bag : -1;
}

template <class T>
SPARSEKIT_DEVICE void scale_bag(const SumGroup<T>& group, int64_t bag) {
  using A = Acc<T>;
  const auto combiner = static_cast<Combiner>(group.features[group.feature_of_bag(bag)].combiner);
  const Range range = group.range(bag);
  const int64_t count = range.end - range.begin;
  group.scaled[bag] = {static_cast<int32_t>(bag),
                       divided(A{1}, divisor(static_cast<A>(count), count, combiner))};
}

// Returns the sort key and the value of entry i. Writes the entry's scale if group.by_entry is set.
template <class T>
SPARSEKIT_DEVICE Entry number_entry(const SumGroup<T>& group, int64_t i) {
  using A = Acc<T>;
  const int t = group.table_of(i);
  if (i < group.entry[t] || i >= group.entry[t + 1]) {  // not an entry of any table
    return {group.key_start(group.num_tables), -1};
  }
  const int32_t bag = bag_of_entry(group, t, i);
  const int64_t number = group.index[i], count = group.row[t + 1] - group.row[t];
  if (number >= count) simt::atomic_min(group.bad_index, i);
  const bool has_row = number >= 0 && number < count && bag >= 0;
  const uint32_t key =
      has_row ? group.key_start(t) + static_cast<uint32_t>(number) : group.no_row(t);
  if (!group.by_entry) return {key, bag};
  if (bag >= 0) {
    const SumFeature<T>& feature = group.features[group.feature_of_bag(bag)];
    const auto combiner = static_cast<Combiner>(feature.combiner);
    A by = 1;
    if (feature.sample_weights == nullptr) {
      const Range range = group.range(bag);
      by = divisor(static_cast<A>(range.end - range.begin), range.end - range.begin, combiner);
    } else if (group.divisors != nullptr) {
      by = group.divisors[bag];
    }
    group.scaled[i] = {bag, divided(group.weight_of(feature, i), by)};
  }
  return {key, static_cast<int32_t>(i)};
}

// Number of entries that each thread of number_entries_kernel handles. With several per thread, a
// block needs fewer atomics to count digits.
constexpr int kNumberSteps = 8;

// Writes the sort key and the value of each entry, and the scales of bags or entries. Counts the
// digits of the sort keys.
template <class T>
SPARSEKIT_KERNEL number_entries_kernel(SumGroup<T> group, DigitCounts digits, Pairs pairs) {
  digits.begin();
  digits.sort.totals.clear();
  for (int step = 0; step < kNumberSteps; ++step) {
    const int64_t i = (simt::block() * kNumberSteps + step) * kSumThreads + simt::thread();
    if (!group.by_entry && group.scaled != nullptr && i < group.num_bags) scale_bag(group, i);
    if (i >= group.entries) continue;
    const Entry entry = number_entry(group, i);
    pairs.keys[i] = entry.key;
    pairs.values[i] = entry.value;
    digits.add(entry.key);
  }
  digits.end();
}

// ---- order of the rows ----

template <class T>
SPARSEKIT_DEVICE int table_of_number(const SumGroup<T>& group, int64_t number) {
  return last_up_to(number, group.num_tables, [&](int t) { return group.row[t]; });
}
template <class T>
SPARSEKIT_DEVICE int32_t row_of_number(const SumGroup<T>& group, int64_t number) {
  const int t = table_of_number(group, number);
  const int64_t at = group.entry[t] + (number - group.row[t]);
  return at < group.entries ? group.rows[at] : 0;
}

template <class T>
SPARSEKIT_KERNEL rows_to_sort_kernel(SumGroup<T> group, int64_t n, uint32_t* keys,
                                     int32_t* numbers) {
  const int64_t i = simt::global_thread();
  if (i >= n) return;
  keys[i] = static_cast<uint32_t>(row_of_number(group, i));
  numbers[i] = static_cast<int32_t>(i);
}
template <class T>
SPARSEKIT_KERNEL tables_to_sort_kernel(SumGroup<T> group, int64_t n, const int32_t* numbers,
                                       uint32_t* keys) {
  const int64_t i = simt::global_thread();
  if (i < n) keys[i] = static_cast<uint32_t>(table_of_number(group, numbers[i]));
}
template <class T>
SPARSEKIT_KERNEL place_rows_kernel(SumGroup<T> group, int64_t n, const int32_t* numbers,
                                   int64_t* sorted_rows) {
  const int64_t i = simt::global_thread();
  if (i >= n) return;
  const int64_t number = numbers[i];
  sorted_rows[i] = static_cast<uint32_t>(row_of_number(group, number));
  const int t = table_of_number(group, number);
  group.at[number] = group.element[t] + (i - group.row[t]) * group.tables[t].dim;
}

// ---- rows in the caller's memory ----

// Memory for the sums of a table. It has space for num_rows rows, which begin at multiples of
// `unit` elements.
struct SumTarget {
  int64_t unit, num_rows;
};

template <class T>
SPARSEKIT_KERNEL rows_to_write_kernel(SumGroup<T> group, const SumTarget* targets,
                                      int64_t* bad_row) {
  const int64_t i = simt::global_thread();
  if (i >= group.entries) return;
  const int t = group.table_of(i);
  const int64_t number = i - group.entry[t];
  if (number < 0 || number >= group.row[t + 1] - group.row[t]) return;
  const int64_t row = group.rows[i];
  const bool good = row >= 0 && row < targets[t].num_rows;
  if (!good) simt::atomic_min(bad_row, i);
  group.at[group.row[t] + number] = good ? row * targets[t].unit : -1;
}

}  // namespace sparsekit::cuda
