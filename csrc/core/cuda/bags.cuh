// Shared by all kernels on bags: the entries of a bag, with bad offsets handled, and the divisor of
// its sum.
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

// Returns the entries of a bag; none if its bounds are bad, that is, out of order or beyond the
// n entries.
SPARSEKIT_DEVICE Range good_range(int64_t begin, int64_t end, int64_t n) {
  return 0 <= begin && begin <= end && end <= n ? Range{begin, end} : Range{0, 0};
}
SPARSEKIT_DEVICE Range bag_range(const Bags& bags, int64_t bag) {
  return good_range(bags.offsets[bag], bags.offsets[bag + 1], bags.n);
}

// Reports offsets[position], for position <= num_bags, if it breaks the rule of Bags.
SPARSEKIT_DEVICE void check_offset(const Bags& bags, int64_t position, int64_t* bad_offset) {
  const int64_t offset = bags.offsets[position];
  const int64_t least = position == 0 ? 0 : bags.offsets[position - 1];
  const bool good = least <= offset && offset <= (position == 0 ? 0 : bags.n) &&
                    (position < bags.num_bags || offset == bags.n);
  if (!good) simt::atomic_min(bad_offset, position);
}

// Returns the bag >= from that contains entry i, or -1. With bad offsets several bags may contain
// it; the result is one of them or -1.
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

// Returns the term of a weight in the total from which the divisor is computed.
template <class A>
SPARSEKIT_DEVICE A in_total(A weight, Combiner combiner) {
  return combiner == Combiner::kMean ? weight : weight * weight;
}

// Returns the divisor of a pooled sum; 0 for a bag that pools to zeros.
template <class A>
SPARSEKIT_DEVICE A divisor(A total, int64_t count, Combiner combiner) {
  if (count == 0) return A{0};
  if (combiner == Combiner::kSum || combiner == Combiner::kNone) return A{1};
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Divides, since the inverse of a tiny divisor would be infinite.
template <class A>
SPARSEKIT_DEVICE A divided(A x, A by) {
  return by == 0 ? A{0} : x / by;
}

}  // namespace sparsekit::cuda
