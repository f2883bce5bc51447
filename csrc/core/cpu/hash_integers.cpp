#include "sparsekit/hash_integers.h"

namespace sparsekit::cpu {

// Minimum number of values per thread; with fewer, another thread costs more than it saves.
constexpr int64_t kGrain = 16384;

void hash_integers(const int64_t* values, int64_t n, bool is_unsigned, uint64_t seed,
                   int64_t* codes, const ParallelFor& parallel_for) {
  parallel_for(0, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      codes[i] = static_cast<int64_t>(hash_decimal_of_bits(values[i], is_unsigned, seed));
    }
  });
}

}  // namespace sparsekit::cpu
