#include "cpu/xxh64_engines.h"

#ifdef SPARSEKIT_HAS_X86_ENGINES

#include <immintrin.h>

#include "sparsekit/xxh64_steps.h"

// Each function enables AVX2 itself, since the rest of the module must run on every x86-64
// processor.
#define SPARSEKIT_TARGET __attribute__((target("avx2,bmi,bmi2")))
#define SPARSEKIT_INLINE SPARSEKIT_TARGET __attribute__((always_inline)) inline

namespace sparsekit::xxh64_avx2 {

using namespace xxh64_steps;

#include "cpu/xxh64_lanes256.h"

// Number of vectors per step, the largest that fits in 16 registers.
constexpr int kSide = 2;

SPARSEKIT_INLINE __m256i in_all(uint64_t x) {
  return _mm256_set1_epi64x(static_cast<long long>(x));
}

// AVX2 cannot multiply 64-bit lanes. Only the low 32 bits of the two cross products of 32-bit
// halves matter, so one multiplication of 32-bit lanes computes both products.
SPARSEKIT_INLINE Lanes times(Lanes x, uint64_t factor) {
  const auto a = reinterpret_cast<__m256i>(x);
  const __m256i low = _mm256_mul_epu32(a, in_all(factor));
  const __m256i mixed = _mm256_mullo_epi32(a, in_all(factor >> 32 | factor << 32));
  return reinterpret_cast<Lanes>(low) + (reinterpret_cast<Lanes>(mixed) << 32) +
         (reinterpret_cast<Lanes>(mixed) & 0xFFFFFFFF00000000);
}
SPARSEKIT_INLINE Lanes times_small(Lanes x, uint64_t factor) {
  const auto a = reinterpret_cast<__m256i>(x);
  const __m256i low = _mm256_mul_epu32(a, in_all(factor));
  const __m256i high = _mm256_mul_epu32(a, in_all(factor >> 32));
  return reinterpret_cast<Lanes>(low) + (reinterpret_cast<Lanes>(high) << 32);
}

#include "cpu/xxh64_together.h"

bool is_supported() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
}

}  // namespace sparsekit::xxh64_avx2

#endif
