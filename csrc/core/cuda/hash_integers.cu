#include "sparsekit/hash_integers.h"

#include "cuda/simt.cuh"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;

SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    hash_integers_kernel(const int64_t* values, int64_t n, bool is_unsigned, uint64_t seed,
                         int64_t* codes) {
  const int64_t i = simt::global_thread();
  if (i >= n) return;
  codes[i] = static_cast<int64_t>(hash_decimal_of_bits(values[i], is_unsigned, seed));
}

}  // namespace

void hash_integers(const int64_t* values, int64_t n, bool is_unsigned, uint64_t seed,
                   int64_t* codes, void* stream) {
  if (n <= 0) return;
  simt::launch("hash_integers", hash_integers_kernel, simt::grid_for(n, kThreads), stream, values,
               n, is_unsigned, seed, codes);
}

}  // namespace sparsekit::cuda
