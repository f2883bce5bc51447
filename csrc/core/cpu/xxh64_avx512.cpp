#include "cpu/xxh64_engines.h"

#ifdef SPARSEKIT_HAS_X86_ENGINES

#include <immintrin.h>

#include "sparsekit/xxh64_steps.h"

// Each function enables AVX-512 itself, since the rest of the module must run on every x86-64
// processor.
#define SPARSEKIT_TARGET __attribute__((target("avx512f,avx512dq,avx512vl,bmi,bmi2")))
#define SPARSEKIT_INLINE SPARSEKIT_TARGET __attribute__((always_inline)) inline

namespace sparsekit::xxh64_avx512 {

using namespace xxh64_steps;

#include "cpu/xxh64_lanes256.h"

// Number of vectors per step, the largest that fits in 32 registers. 512-bit vectors were not
// faster: AVX-512 helps because it can multiply and rotate 64-bit lanes, not because its vectors
// are wider.
constexpr int kSide = 8;

SPARSEKIT_INLINE Lanes times(Lanes x, uint64_t factor) {
  return x * factor;
}
SPARSEKIT_INLINE Lanes times_small(Lanes x, uint64_t factor) {
  return x * factor;
}

#include "cpu/xxh64_together.h"

bool is_supported() {
  return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("bmi2");
}

}  // namespace sparsekit::xxh64_avx512

#endif
