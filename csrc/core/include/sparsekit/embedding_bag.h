// Pools table rows into bags, and computes the gradients of pooling.
#pragma once

#include <cstdint>

#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// Combines the rows x_i of a bag, with weights w_i (1 when there are none), into one vector:
//   sum: S = sum w_i x_i;   mean: S / sum w_i;   sqrtn: S / sqrt(sum w_i^2).
// If the divisor is zero, as for an empty bag, the vector is all zeros. With kNone, a bag has at
// most one row, which is copied. Only the ops on many tables accept kNone.
enum class Combiner : int64_t { kSum = 0, kMean = 1, kSqrtn = 2, kNone = 3 };

// Bag b pools rows[offsets[b] : offsets[b + 1]].
struct Bags {
  const int64_t* rows;  // [n] row indices; a negative index stands for a row of zeros
  int64_t n;
  const int64_t* offsets;  // [num_bags + 1], non-decreasing, from 0 to n
  int64_t num_bags;
};

namespace cpu {

// Returns the first index where `offsets` violates the requirements of Bags, or -1 if none does.
int64_t check_offsets(const Bags& bags, const ParallelFor& parallel_for);

// Pools rows of weight [num_rows, dim] into out [num_bags, dim]; sample_weights [n] may be null.
// Returns -1, or a position in `rows` whose row is >= num_rows; `out` is then undefined.
template <class T>
int64_t embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                      const Acc<T>* sample_weights, Combiner combiner, T* out,
                      const ParallelFor& parallel_for);

// Returns the workspace size in bytes of embedding_bag_backward.
template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows,
                                               const ParallelFor& parallel_for);

// Computes grad_weight [num_rows, dim] from grad_out [num_bags, dim]. Rows that are in no bag get
// zeros. The order of additions is fixed, as in unsorted_segment_sum. Returns -1 or a bad position,
// like embedding_bag.
template <class T>
int64_t embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                               const Acc<T>* sample_weights, Combiner combiner, T* grad_weight,
                               void* workspace, const ParallelFor& parallel_for);

// Computes grad_sample_weights [n], the gradient of sample_weights. Offsets and rows must have
// passed the checks of the forward pass.
template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t dim,
                                           const Bags& bags, const Acc<T>* sample_weights,
                                           Combiner combiner, Acc<T>* grad_sample_weights,
                                           const ParallelFor& parallel_for);

}  // namespace cpu

// On a device, the kernels check offsets and rows. The caller sets *bad_offset and *bad_row to
// INT64_MAX. If there is a bad offset, *bad_offset becomes the position that cpu::check_offsets
// would return. If any row is >= num_rows, *bad_row becomes the smallest position of such a row. A
// bag with bad offsets is treated as empty, and a bad row as a row of zeros. Preconditions: n <
// 2^31 and num_bags < 2^31.
namespace cuda {

struct BagErrors {
  int64_t* bad_offset;
  int64_t* bad_row;
};

template <class T>
int64_t embedding_bag_workspace_bytes(const Bags& bags, int64_t dim);

template <class T>
void embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                   const Acc<T>* sample_weights, Combiner combiner, T* out, const BagErrors& errors,
                   void* workspace, void* stream);

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows);

// Like the CPU version. `deterministic` has the same meaning as in unsorted_segment_sum.
// Precondition: num_rows < 2^32 - 1.
template <class T>
void embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                            const Acc<T>* sample_weights, Combiner combiner, bool deterministic,
                            T* grad_weight, const BagErrors& errors, void* workspace, void* stream);

template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t num_rows,
                                           int64_t dim, const Bags& bags,
                                           const Acc<T>* sample_weights, Combiner combiner,
                                           Acc<T>* grad_sample_weights, const BagErrors& errors,
                                           void* stream);

}  // namespace cuda
}  // namespace sparsekit
