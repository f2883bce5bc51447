// One fused optimizer step over the touched rows.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// For step t >= 1 (global: counted by calls, not by row), with gradient g of a touched row:
//   m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g^2,
//   w = w - lr sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps).
// Kingma and Ba, "Adam", ICLR 2015, the efficient form at the end of section 2, on touched rows
// only. eps is therefore outside the root and not rescaled, as in torch.optim.SparseAdam.
struct LazyAdam {
  double lr;
  double beta1;
  double beta2;
  double eps;
};

namespace cpu {

// Updates the rows `rows` [n], which must be distinct, of weight, exp_avg and exp_avg_sq, all
// [num_rows, dim], with the gradients grad [n, dim]. rows null means row i for gradient i. All
// other rows keep their bits. Returns -1, or the first position whose row is outside
// [0, num_rows); then nothing has been changed.
template <class T>
int64_t lazy_adam_step(T* weight, Acc<T>* exp_avg, Acc<T>* exp_avg_sq, int64_t num_rows,
                       int64_t dim, const int64_t* rows, const T* grad, int64_t n,
                       const LazyAdam& adam, int64_t step, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// *step is read on the device; nothing happens when it is below 1. Rows outside [0, num_rows) are
// left out and reported in *bad, as in gather_rows.
template <class T>
void lazy_adam_step(T* weight, Acc<T>* exp_avg, Acc<T>* exp_avg_sq, int64_t num_rows, int64_t dim,
                    const int64_t* rows, const T* grad, DeviceCount n, const LazyAdam& adam,
                    const int64_t* step, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
