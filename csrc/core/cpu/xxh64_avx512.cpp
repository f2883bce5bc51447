#include "cpu/xxh64_engines.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <immintrin.h>

#include "sparsekit/xxh64_steps.h"

// The rest of the module must run on every x86-64, so each function enables these instructions
// itself.
#define SPARSEKIT_AVX512 __attribute__((target("avx512f,avx512dq,avx512vl,bmi,bmi2")))
#define SPARSEKIT_INLINE SPARSEKIT_AVX512 __attribute__((always_inline)) inline

namespace sparsekit::xxh64_avx512 {
namespace {

using namespace xxh64_steps;

#include "cpu/xxh64_lanes256.h"

// Uses 32 registers. Vectors of 512 bits were not faster: the gain of AVX-512 is its multiplication
// and rotation of 64-bit lanes.
constexpr int kSide = 8;

SPARSEKIT_INLINE Lanes times(Lanes x, uint64_t factor) {
  return x * factor;
}
SPARSEKIT_INLINE Lanes times_small(Lanes x, uint64_t factor) {
  return x * factor;
}

#include "cpu/xxh64_together.h"

}  // namespace

bool is_supported() {
  return __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("bmi2");
}

SPARSEKIT_AVX512 void hash_together(const WaitingText* texts, int count, size_t size, uint64_t seed,
                                    int64_t* codes) {
  for (int k = 0; k < count; k += kSide * kLanes) hash_side(texts + k, size, seed, codes);
}

}  // namespace sparsekit::xxh64_avx512

#else

namespace sparsekit::xxh64_avx512 {

bool is_supported() {
  return false;
}
void hash_together(const WaitingText*, int, size_t, uint64_t, int64_t*) {}

}  // namespace sparsekit::xxh64_avx512

#endif
