// The bags of features in the form that the kernels for one table take.
#pragma once

#include <algorithm>

#include "cuda/bags.cuh"
#include "cuda/workspace.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::cuda {

// Entries of a feature, or of all features of a table. Bags may be anything.
struct DeviceBags {
  const int32_t* bags;  // [num_bags + 1]
  int64_t num_bags;
  int64_t entries;  // of all tables
  int64_t most;     // more than this have no room

  SPARSEKIT_DEVICE int64_t clamped(int64_t b, int64_t least, int64_t end) const {
    const int64_t at = bags[b];
    return at < least ? least : at > end ? end : at;
  }
  SPARSEKIT_DEVICE int64_t begin() const { return clamped(0, 0, entries); }
  SPARSEKIT_DEVICE int64_t end() const {
    const int64_t from = begin(), last = from + most < entries ? from + most : entries;
    return clamped(num_bags, from, last);
  }
};

template <class T>
DeviceBags device_bags(const FeatureBags<T>& feature, int64_t entries) {
  const bool limited = feature.max_nnz <= entries / std::max<int64_t>(feature.num_bags, 1);
  const int64_t most = limited ? feature.num_bags * feature.max_nnz : entries;
  return {feature.bags.narrow, feature.num_bags, entries, most};
}

// Bags of one feature or several, as the kernels for one table take them: what the host does not
// know the end of is followed by a bag of entries that have no row.
template <class A>
struct PlainBags {
  int64_t* numbers;  // [n]
  int64_t* offsets;  // [num_bags + 2]
  A* weights;        // [n], or null
  int64_t n;
  int64_t num_bags;

  Bags bags() const { return {numbers, n, offsets, num_bags + 1}; }
};

template <class T>
PlainBags<Acc<T>> take_plain_bags(Arena& arena, int64_t n, int64_t num_bags, bool weighted) {
  return {arena.take<int64_t>(n), arena.take<int64_t>(num_bags + 2),
          weighted ? arena.take<Acc<T>>(n) : nullptr, n, num_bags};
}

// What the numbers of a table's entries mean. `rows`, if not null, and `count` are on the device.
struct Numbers {
  const int32_t* index;
  const int32_t* rows;
  const int64_t* count;
  DeviceBags table;
};

// The weight of a feature's entry.
template <class T>
SPARSEKIT_DEVICE Acc<T> weight_of(const FeatureBags<T>& feature, int64_t i) {
  if (feature.sample_weights == nullptr) return Acc<T>{1};
  const int64_t at = feature.first() + i;
  return at >= 0 && at < feature.num_keys ? feature.sample_weights[at] : Acc<T>{0};
}

// From a feature's entries to plain bags, which count entries from `first` on; the feature's bags
// are there from first_bag on. A thread for each entry and bag.
template <class T>
SPARSEKIT_KERNEL plain_bags_kernel(FeatureBags<T> feature, DeviceBags own, Numbers in,
                                   DeviceBags first, bool scale, int64_t first_bag,
                                   PlainBags<Acc<T>> out, int64_t* bad_index) {
  using A = Acc<T>;
  const int64_t i = simt::global_thread();
  const int64_t begin = own.begin(), end = own.end(), zero = first.begin();
  if (i < end - begin) {
    const int64_t entry = begin + i, at = entry - zero;
    int64_t number = in.index[entry];
    const int64_t listed = in.table.begin() + number;
    const bool is_beyond = in.count != nullptr && number >= *in.count;
    if (is_beyond || (in.rows != nullptr && listed >= in.table.entries)) {
      simt::atomic_min(bad_index, entry);
      number = -1;
    } else if (in.rows != nullptr && number >= 0) {
      number = in.rows[listed];
    }
    if (at >= 0 && at < out.n) {
      out.numbers[at] = number;
      if (out.weights != nullptr && !scale) out.weights[at] = weight_of(feature, i);
    }
  }
  if (i >= own.num_bags) return;
  const int64_t bag_begin = own.clamped(i, begin, end);
  const int64_t bag_end = own.clamped(i + 1, bag_begin, end);
  out.offsets[first_bag + i] = bag_begin - zero;
  if (!scale) return;
  // Features of a table pool in different ways: as sums of rows that are scaled already.
  A total = 0;
  for (int64_t e = bag_begin; e < bag_end; ++e) {
    const A weight = weight_of(feature, e - begin);
    total += feature.combiner == Combiner::kSqrtn ? weight * weight : weight;
  }
  A by = feature.combiner == Combiner::kMean ? total : std::sqrt(total);
  if (feature.combiner == Combiner::kSum || feature.combiner == Combiner::kNone) by = A{1};
  for (int64_t e = bag_begin; e < bag_end; ++e) {
    const int64_t at = e - zero;
    if (at >= 0 && at < out.n) out.weights[at] = divided(weight_of(feature, e - begin), by);
  }
}

// What is behind the last entry: numbers of no row, in a bag of their own.
template <class A>
SPARSEKIT_KERNEL rest_of_bags_kernel(DeviceBags all, PlainBags<A> out) {
  const int64_t i = simt::global_thread();
  const int64_t count = all.end() - all.begin() < out.n ? all.end() - all.begin() : out.n;
  if (i >= count && i < out.n) {
    out.numbers[i] = -1;
    if (out.weights != nullptr) out.weights[i] = A{0};
  }
  if (i == 0) {
    out.offsets[out.num_bags] = count;
    out.offsets[out.num_bags + 1] = out.n;
  }
}

}  // namespace sparsekit::cuda
