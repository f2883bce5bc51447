#include "sparsekit/lazy_adam.h"

#include <algorithm>
#include <cmath>

#include "cuda/row_shape.h"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;
// More than any device runs at a time; each block then has rows enough to be worth its two powers.
constexpr int64_t kMaxBlocks = 2048;

template <class T, int N>
SPARSEKIT_DEVICE simt::Vec<T, N> read(const T* address) {
  return *reinterpret_cast<const simt::Vec<T, N>*>(address);
}
template <class T, int N>
SPARSEKIT_DEVICE void write(T* address, const simt::Vec<T, N>& value) {
  *reinterpret_cast<simt::Vec<T, N>*>(address) = value;
}

template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    lazy_adam_kernel(T* weight, Acc<T>* exp_avg, Acc<T>* exp_avg_sq, int64_t num_rows, int64_t dim,
                     const int64_t* rows, const T* grad, DeviceCount n, LazyAdam adam,
                     const int64_t* step, int64_t* bad, int log2_lanes) {
  using A = Acc<T>;
  if (*step < 1) return;
  A* shared_step_size = simt::shared<A>();
  if (simt::thread() == 0) {
    const auto t = static_cast<double>(*step);
    *shared_step_size = static_cast<A>(adam.lr * std::sqrt(1 - std::pow(adam.beta2, t)) /
                                       (1 - std::pow(adam.beta1, t)));
  }
  simt::barrier();
  const A step_size = *shared_step_size;
  const A beta1 = static_cast<A>(adam.beta1), keep1 = static_cast<A>(1 - adam.beta1);
  const A beta2 = static_cast<A>(adam.beta2), keep2 = static_cast<A>(1 - adam.beta2);
  const A eps = static_cast<A>(adam.eps);

  const int64_t column = first_element(kWidth, log2_lanes);
  const int64_t count = n.get(), tiles = simt::global_threads() >> log2_lanes;
  for (int64_t i = tile_of_thread(log2_lanes); i < count; i += tiles) {
    const int64_t row = rows == nullptr ? i : rows[i];
    if (row < 0 || row >= num_rows) {
      if (column == 0) simt::atomic_min(bad, i);
      continue;
    }
    if (column >= dim) continue;
    const int64_t at = row * dim + column;
    const auto g = read<T, kWidth>(grad + i * dim + column);
    auto m = read<A, kWidth>(exp_avg + at);
    auto v = read<A, kWidth>(exp_avg_sq + at);
    auto w = read<T, kWidth>(weight + at);
    for (int j = 0; j < kWidth; ++j) {
      const A gradient = load(g.at[j]);
      m.at[j] = beta1 * m.at[j] + keep1 * gradient;
      v.at[j] = beta2 * v.at[j] + keep2 * gradient * gradient;
      w.at[j] = store<T>(load(w.at[j]) - step_size * (m.at[j] / (std::sqrt(v.at[j]) + eps)));
    }
    write(exp_avg + at, m);
    write(exp_avg_sq + at, v);
    write(weight + at, w);
  }
}

}  // namespace

template <class T>
void lazy_adam_step(T* weight, Acc<T>* exp_avg, Acc<T>* exp_avg_sq, int64_t num_rows, int64_t dim,
                    const int64_t* rows, const T* grad, DeviceCount n, const LazyAdam& adam,
                    const int64_t* step, int64_t* bad, void* stream) {
  if (n.most <= 0) return;
  // The moments fill their accesses; BFloat16 weights beside them have half as many bytes.
  using A = Acc<T>;
  const RowShape shape = row_shape<A>(dim, exp_avg, exp_avg_sq, weight, grad);
  simt::Grid grid = grid_for_rows(n.most, shape, kThreads);
  grid.blocks = std::min(grid.blocks, std::max<int64_t>(1, kMaxBlocks / grid.columns));
  grid.shared_bytes = sizeof(A);
  simt::launch("lazy_adam_step",
               shape.width == 1 ? lazy_adam_kernel<T, 1> : lazy_adam_kernel<T, kWide<A>>, grid,
               stream, weight, exp_avg, exp_avg_sq, num_rows, dim, rows, grad, n, adam, step, bad,
               shape.log2_lanes);
}

#define SPARSEKIT_INSTANTIATE(T)                                                                 \
  template void lazy_adam_step(T*, Acc<T>*, Acc<T>*, int64_t, int64_t, const int64_t*, const T*, \
                               DeviceCount, const LazyAdam&, const int64_t*, int64_t*, void*);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
