#include "sparsekit/update_rows.h"

#include <algorithm>

#include "cuda/table_access.cuh"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;
// On a multiprocessor, at least. With it ptxas takes a few registers more where it would spill.
constexpr int kBlocksAtOnce = 2;
// More than any device runs at a time; each block then has rows enough to be worth its two powers.
constexpr int64_t kMaxBlocks = 2048;

// Mean of squares of a row, the same on all lanes of its tile. All lanes of the warp call it.
template <class T, int kWidth>
SPARSEKIT_DEVICE Acc<T> mean_square(const T* row, int64_t dim, int log2_lanes) {
  Acc<T> sum = 0;
  if (row != nullptr) {
    for (int64_t at = first_element(kWidth, log2_lanes); at < dim; at += kWidth << log2_lanes) {
      const auto g = read<T, kWidth>(row + at);
      for (int j = 0; j < kWidth; ++j) sum += load(g.at[j]) * load(g.at[j]);
    }
  }
  for (int apart = 1 << log2_lanes >> 1; apart > 0; apart >>= 1) {
    sum += simt::warp_shuffle(sum, simt::lane() ^ apart);
  }
  return dim == 0 ? sum : sum / static_cast<Acc<T>>(dim);
}

template <class Rule, class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(kThreads, kBlocksAtOnce)
    update_rows_kernel(RowTable<T> table, const int64_t* rows, const T* grad, DeviceCount n,
                       Rule rule, StepNumber step, Rounding rounding, int64_t* bad, int columns,
                       int log2_lanes) {
  using A = Acc<T>;
  using Numbers = typename Rule::template Numbers<A>;
  const int64_t t = *step.step, dim = table.dim;
  if (t < 1) return;
  Numbers* shared = simt::shared<Numbers>();
  if (simt::thread() == 0) *shared = rule.template at<A>(t);
  simt::barrier();
  Numbers numbers = *shared;

  const int64_t column = first_element(kWidth, log2_lanes);
  const int64_t stride = static_cast<int64_t>(columns) * kWidth << log2_lanes;
  const int leader = simt::lane() >> log2_lanes << log2_lanes;
  const int64_t count = n.get(), tiles = simt::global_threads() >> log2_lanes;
  const int64_t tile_in_warp = simt::lane() >> log2_lanes;
  const int64_t first = tile_of_thread(log2_lanes) - tile_in_warp;
  const auto row_at = [&](int64_t i) { return i >= count ? -1 : rows == nullptr ? i : rows[i]; };
  // One ahead, so that no row has to wait for its number first.
  int64_t next_row = row_at(first + tile_in_warp);
  // The lanes of a warp stay together, for what they tell each other.
  for (int64_t of_warp = first; of_warp < count; of_warp += tiles) {
    const int64_t i = of_warp + tile_in_warp;
    int64_t row = next_row;
    next_row = row_at(i + tiles);
    if (i < count && (row < 0 || row >= table.num_rows)) {
      if (column == 0) simt::atomic_min(bad, i);
      row = -1;
    }
    if (table.row_step != nullptr) {
      int32_t own = 1;
      if (column == 0 && row >= 0) {
        own = row_step_of(step.per_row ? int64_t{table.row_step[row]} + 1 : t);
        table.row_step[row] = own;
      }
      if constexpr (Rule::kPerRow) {
        if (step.per_row) numbers = rule.template at<A>(simt::warp_shuffle(own, leader));
      }
    }
    A of_row = 0;
    if constexpr (Rule::kRowWise) {
      const A mean = mean_square<T, kWidth>(row < 0 ? nullptr : grad + i * dim, dim, log2_lanes);
      if (column == 0 && row >= 0) {
        A* state = table.states[0] + row * table.strides[0];
        *state = of_row = Rule::accumulate(*state, mean);
      }
      of_row = simt::warp_shuffle(of_row, leader);
    }
    if (row < 0) continue;
    for (int64_t at = column; at < dim; at += stride) {
      const auto g = read<T, kWidth>(grad + i * dim + at);
      auto w = read<T, kWidth>(table.weight + row * dim + at);
      TableSlice<A, kWidth, Rule::kRowWise ? 0 : Rule::kStates> states;
      states.read(table, row, at);
      Philox4x32 random{};
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (rounding.stochastic) random = rounding_bits(rounding.seed, t, row, at / 8);
      }
      for (int j = 0; j < kWidth; ++j) {
        A weight = load(w.at[j]), s[kMostStates];
        if constexpr (Rule::kRowWise) s[0] = of_row;
        states.get(j, s);
        Rule::step(numbers, load(g.at[j]), weight, s);
        states.set(j, s);
        w.at[j] = store<T>(weight);
        if constexpr (std::is_same_v<T, BFloat16>) {
          if (rounding.stochastic) {
            w.at[j] = store_at_random(weight, bits_of_column(random, at + j));
          }
        }
      }
      states.write(table, row, at);
      write(table.weight + row * dim + at, w);
    }
  }
}

}  // namespace

template <class Rule, class T>
void update_rows(const RowTable<T>& table, const int64_t* rows, const T* grad, DeviceCount n,
                 const Rule& rule, StepNumber step, Rounding rounding, int64_t* bad, void* stream) {
  if (n.most <= 0) return;
  // The states fill their accesses; BFloat16 weights beside them have half as many bytes.
  const RowShape shape = shape_of(table, Rule::kRowWise ? 0 : Rule::kStates, grad);
  simt::Grid grid = grid_for_rows(n.most, shape, kThreads);
  // What is one for a row must be done by one tile.
  if (Rule::kRowWise || step.per_row) grid.columns = 1;
  grid.blocks = std::min(grid.blocks, std::max<int64_t>(1, kMaxBlocks / grid.columns));
  grid.shared_bytes = sizeof(typename Rule::template Numbers<Acc<T>>);
  simt::launch("update_rows",
               shape.width == 1 ? update_rows_kernel<Rule, T, 1>
                                : update_rows_kernel<Rule, T, kWide<Acc<T>>>,
               grid, stream, table, rows, grad, n, rule, step, rounding, bad, grid.columns,
               shape.log2_lanes);
}

#define SPARSEKIT_INSTANTIATE(Rule, T)                                                 \
  template void update_rows(const RowTable<T>&, const int64_t*, const T*, DeviceCount, \
                            const Rule&, StepNumber, Rounding, int64_t*, void*);
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, float)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, double)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
