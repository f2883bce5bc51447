#include "serving/include/sparsekit_serving.h"
#include "serving/pool_kernels.h"

#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace sparsekit::serving::generic {
namespace {

#include "serving/pool_rows.h"
#include "serving/top_k_rows.h"

}  // namespace

const PoolKernels kernels = {find, pool, decode, score, select};

}  // namespace sparsekit::serving::generic
