// Divisors of pooled sums, and the minimum number of bags per thread.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "cpu/sum_rows.h"
#include "sparsekit/embedding_bag.h"

namespace sparsekit::cpu {

// Adds up weights begin, ..., end - 1, squared for kSqrtn.
template <class A>
[[gnu::noinline]] A total_weight(const A* weights, int64_t begin, int64_t end, Combiner combiner) {
  A total = 0;
  for (int64_t run = begin; run < end; run += kSumRun) {  // the same runs as in sum_rows
    const int64_t stop = std::min(end, run + kSumRun);
    A sum = 0;
    for (int64_t i = run; i < stop; ++i) {
      sum += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
    }
    total += sum;
  }
  return total;
}

// Returns the divisor of the bag with the entries [begin, end); 0 for a bag that pools to zeros.
template <class A>
inline A divisor(const A* weights, int64_t begin, int64_t end, Combiner combiner) {
  if (begin == end) return 0;
  if (combiner == Combiner::kSum || combiner == Combiner::kNone) return 1;
  const A total = weights == nullptr ? static_cast<A>(end - begin)
                                     : total_weight(weights, begin, end, combiner);
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Divides, since the inverse of a tiny divisor would be infinite.
template <class X, class A>
X divided(X x, A divisor) {
  return divisor == 0 ? X{} : x / divisor;
}

// Returns the minimum number of bags per thread.
inline int64_t bag_grain(int64_t n, int64_t num_bags, int64_t dim) {
  const int64_t elements_per_bag = (n / std::max<int64_t>(num_bags, 1) + 1) * dim;
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(elements_per_bag, 1));
}

}  // namespace sparsekit::cpu
