// Computes divisors of pooled sums, bag gradients, and the minimum number of bags per thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/sum_rows.h"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::cpu {

// Returns the sum of weights[begin : end], or the sum of their squares for kSqrtn.
template <class A>
[[gnu::noinline]] A total_weight(const A* weights, int64_t begin, int64_t end, Combiner combiner) {
  A total = 0;
  for (int64_t run = begin; run < end; run += kSumRun) {  // add in the same runs as sum_rows
    const int64_t stop = std::min(end, run + kSumRun);
    A sum = 0;
    for (int64_t i = run; i < stop; ++i) {
      sum += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
    }
    total += sum;
  }
  return total;
}

// Returns the divisor for the sum of the entries [begin, end) of a bag, or 0 if the bag's vector is
// all zeros.
template <class A>
inline A divisor(const A* weights, int64_t begin, int64_t end, Combiner combiner) {
  if (begin == end) return 0;
  if (combiner == Combiner::kSum || combiner == Combiner::kNone) return 1;
  const A total = weights == nullptr ? static_cast<A>(end - begin)
                                     : total_weight(weights, begin, end, combiner);
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Divides `x` instead of multiplying it by 1 / divisor, which is infinite for a tiny divisor.
template <class X, class A>
X divided(X x, A divisor) {
  return divisor == 0 ? X{} : x / divisor;
}

// Returns the minimum number of bags per thread.
inline int64_t bag_grain(int64_t n, int64_t num_bags, int64_t dim) {
  const int64_t elements_per_bag = (n / std::max<int64_t>(num_bags, 1) + 1) * dim;
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(elements_per_bag, 1));
}

// The entries of a table's bags as input to a segment reduction: each entry contributes its bag's
// gradient.
template <class T, bool kScaled>
struct BagGradients {
  static constexpr bool scaled = kScaled;
  const FeatureBags<T>* features;
  int64_t num_features;
  int64_t first_entry;

  template <class F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    const auto after = [](int64_t entry, const FeatureBags<T>& bags) {
      return entry < bags.first_entry();
    };
    const FeatureBags<T>* bags =
        std::upper_bound(features, features + num_features, first_entry + begin, after) - 1;
    for (int64_t i = begin; i < end; ++bags) {
      const int64_t stop = std::min(end, bags->bags[bags->num_bags] - first_entry);
      if (i < stop) visit_feature(*bags, i, stop, f);
      i = std::max(i, stop);
    }
  }

 private:
  // Visits the entries [begin, end), which all belong to this feature.
  template <class F>
  void visit_feature(const FeatureBags<T>& bags, int64_t begin, int64_t end, const F& f) const {
    const EntryNumbers bounds = bags.bags;
    const int64_t base = first_entry, stride = bags.stride;
    const Combiner combiner = bags.combiner;
    // Add this to an entry's position in the table to get the index of the entry's weight.
    const int64_t to_weight = base - bags.first_entry() + bags.first();
    const Acc<T>* weights = bags.sample_weights;
    // Find the last bag that begins at or before `begin`, by binary search.
    int64_t low = 0, high = bags.num_bags;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (bounds[middle] - base <= begin ? low : high) = middle;
    }
    const T* row = bags.grad + low * stride;
    int64_t bag_begin = bounds[low] - base;
    for (int64_t i = begin; i < end; ++low, row += stride) {
      const int64_t bag_end = bounds[low + 1] - base;
      const int64_t stop = std::min(end, bag_end);
      if constexpr (kScaled) {
        const Acc<T> total = divisor(weights, bag_begin + to_weight, bag_end + to_weight, combiner);
        for (; i < stop; ++i) {
          f(i, row, divided(weights == nullptr ? Acc<T>{1} : weights[i + to_weight], total));
        }
      } else {
        for (; i < stop; ++i) f(i, row, Acc<T>{1});
      }
      bag_begin = bag_end;
    }
  }
};

}  // namespace sparsekit::cpu
