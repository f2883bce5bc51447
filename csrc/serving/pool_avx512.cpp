#include "serving/pool_kernels.h"

#ifdef SPARSEKIT_SERVING_X86

#include <immintrin.h>

#include "serving/include/sparsekit_serving.h"

namespace sparsekit::serving::avx512 {
namespace {

#include "serving/pool_rows.h"
#include "serving/top_k_rows.h"

}  // namespace

bool is_supported() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("f16c");
}

const PoolKernels kernels = {find, pool, decode, score, select};

}  // namespace sparsekit::serving::avx512

#endif
