// Helpers for all kernels on bags. They find a bag's entries, even if offsets are bad, and compute
// the divisor of the bag's sum.
#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/simt.cuh"
#include "sparsekit/embedding_bag.h"

namespace sparsekit::cuda {

struct Range {
  int64_t begin;
  int64_t end;
};

// Returns the range of a bag's entries. It is empty if the bag's bounds are bad, that is, out of
// order or beyond the n entries.
SPARSEKIT_DEVICE Range good_range(int64_t begin, int64_t end, int64_t n) {
  return 0 <= begin && begin <= end && end <= n ? Range{begin, end} : Range{0, 0};
}
SPARSEKIT_DEVICE Range bag_range(const Bags& bags, int64_t bag) {
  return good_range(bags.offsets[bag], bags.offsets[bag + 1], bags.n);
}

// Reports `position` if offsets[position] violates the requirements of Bags; position <= num_bags.
SPARSEKIT_DEVICE void check_offset(const Bags& bags, int64_t position, int64_t* bad_offset) {
  const int64_t offset = bags.offsets[position];
  const int64_t least = position == 0 ? 0 : bags.offsets[position - 1];
  const bool good = least <= offset && offset <= (position == 0 ? 0 : bags.n) &&
                    (position < bags.num_bags || offset == bags.n);
  if (!good) simt::atomic_min(bad_offset, position);
}

// Returns the first bag at or after bag `from` that contains entry i, or -1 if there is none. With
// bad offsets, several bags may contain the entry; the result is then any of these bags, or -1.
SPARSEKIT_DEVICE int64_t find_bag(const Bags& bags, int64_t i, int64_t from) {
  int64_t low = from, high = bags.num_bags;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (bags.offsets[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (low >= bags.num_bags) return -1;
  const Range range = bag_range(bags, low);
  return range.begin <= i && i < range.end ? low : -1;
}

// Returns true if the combiner divides a bag's sum.
SPARSEKIT_DEVICE bool has_divisor(Combiner combiner) {
  return combiner == Combiner::kMean || combiner == Combiner::kSqrtn;
}

// Returns what a weight adds to the total that determines the divisor: the weight itself for kMean,
// otherwise its square.
template <class A>
SPARSEKIT_DEVICE A in_total(A weight, Combiner combiner) {
  return combiner == Combiner::kMean ? weight : weight * weight;
}

// Returns the divisor of a pooled sum, or 0 if the bag's vector is all zeros.
template <class A>
SPARSEKIT_DEVICE A divisor(A total, int64_t count, Combiner combiner) {
  if (count == 0) return A{0};
  if (!has_divisor(combiner)) return A{1};
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Divides `x` instead of multiplying it by 1 / by, which is infinite for a tiny `by`.
template <class A>
SPARSEKIT_DEVICE A divided(A x, A by) {
  return by == 0 ? A{0} : x / by;
}

}  // namespace sparsekit::cuda
