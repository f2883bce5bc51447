#include "sparsekit/lazy_adam.h"

#include <algorithm>
#include <cmath>

#include "cpu/sum_rows.h"

namespace sparsekit::cpu {

template <class T>
int64_t lazy_adam_step(T* weight, Acc<T>* exp_avg, Acc<T>* exp_avg_sq, int64_t num_rows,
                       int64_t dim, const int64_t* rows, const T* grad, int64_t n,
                       const LazyAdam& adam, int64_t step, const ParallelFor& parallel_for) {
  if (rows != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] < 0 || rows[i] >= num_rows) return i;
    }
  }
  using A = Acc<T>;
  const auto t = static_cast<double>(step);
  const A step_size = static_cast<A>(adam.lr * std::sqrt(1 - std::pow(adam.beta2, t)) /
                                     (1 - std::pow(adam.beta1, t)));
  const A beta1 = static_cast<A>(adam.beta1), keep1 = static_cast<A>(1 - adam.beta1);
  const A beta2 = static_cast<A>(adam.beta2), keep2 = static_cast<A>(1 - adam.beta2);
  const A eps = static_cast<A>(adam.eps);
  const auto row_of = [=](int64_t i) { return rows == nullptr ? i : rows[i]; };

  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1));
  parallel_for(0, n, grain, [=](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        const int64_t next = row_of(i + kAhead) * dim;
        prefetch_row(weight + next, dim);
        prefetch_row(exp_avg + next, dim);
        prefetch_row(exp_avg_sq + next, dim);
      }
      T* __restrict__ w = weight + row_of(i) * dim;
      A* __restrict__ m = exp_avg + row_of(i) * dim;
      A* __restrict__ v = exp_avg_sq + row_of(i) * dim;
      const T* __restrict__ g = grad + i * dim;
      for (int64_t j = 0; j < dim; ++j) {
        const A gradient = load(g[j]);
        m[j] = beta1 * m[j] + keep1 * gradient;
        v[j] = beta2 * v[j] + keep2 * gradient * gradient;
        w[j] = store<T>(load(w[j]) - step_size * (m[j] / (std::sqrt(v[j]) + eps)));
      }
    }
  });
  return -1;
}

#define SPARSEKIT_INSTANTIATE(T)                                                          \
  template int64_t lazy_adam_step(T*, Acc<T>*, Acc<T>*, int64_t, int64_t, const int64_t*, \
                                  const T*, int64_t, const LazyAdam&, int64_t,            \
                                  const ParallelFor&);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
