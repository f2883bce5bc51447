#include "sparsekit/catch_up_rows.h"

#include "cuda/table_access.cuh"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;
// Minimum number of resident blocks per multiprocessor. With this hint, ptxas uses a few more
// registers instead of spilling.
constexpr int kBlocksAtOnce = 2;

template <class Rule, class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(kThreads, kBlocksAtOnce)
    catch_up_rows_kernel(RowTable<T> table, const int64_t* rows, int64_t n, Rule rule,
                         MissedSteps missed, int64_t most_replayed, int64_t* bad, int log2_lanes) {
  using A = Acc<T>;
  const int64_t last = missed.last_step(), dim = table.dim;
  const int64_t column = first_element(kWidth, log2_lanes);
  const int leader = simt::lane() >> log2_lanes << log2_lanes;
  const int64_t tiles = simt::global_threads() >> log2_lanes;
  const int64_t tile_in_warp = simt::lane() >> log2_lanes;
  const auto row_at = [&](int64_t i) { return i >= n ? -1 : rows == nullptr ? i : rows[i]; };
  // Read each row index one step ahead, so that loads of rows do not wait for it.
  int64_t next_row = row_at(tile_of_thread(log2_lanes));
  for (int64_t of_warp = tile_of_thread(log2_lanes) - tile_in_warp; of_warp < n; of_warp += tiles) {
    const int64_t i = of_warp + tile_in_warp;
    int64_t row = next_row;
    next_row = row_at(i + tiles);
    if (row >= table.num_rows) {
      if (column == 0) simt::atomic_min(bad, i);
      row = -1;
    }
    // One lane reads the step of the row's last update, and marks the row as up to date.
    int32_t at_step = 0;
    if (column == 0 && row >= 0) {
      at_step = table.row_step[row];
      if (at_step != 0 && at_step < last && missed.count > 0)
        table.row_step[row] = static_cast<int32_t>(last);
    }
    at_step = simt::warp_shuffle(at_step, leader);
    if (row < 0 || at_step == 0) continue;
    const int64_t from = at_step < missed.first_step ? missed.first_step : int64_t{at_step} + 1;
    const int64_t count = last + 1 - from;
    if (count <= 0) continue;
    const double* numbers = missed.numbers + 2 * (from - missed.first_step);
    const int64_t replayed = count < most_replayed ? count : most_replayed;
    for (int64_t at = column; at < dim; at += kWidth << log2_lanes) {
      auto w = read<T, kWidth>(table.weight + row * table.stride + at);
      TableSlice<A, kWidth, Rule::kStates> states;
      states.read(table, row, at);
      for (int64_t k = 0; k < replayed; ++k) {
        const auto of_step = rule.template without_gradient<A>(numbers[2 * k], numbers[2 * k + 1]);
        for (int j = 0; j < kWidth; ++j) {
          A weight = load(w.at[j]), s[Rule::kStates];
          states.get(j, s);
          Rule::step(of_step, A{0}, weight, s);
          states.set(j, s);
          w.at[j] = store<T>(weight);
        }
      }
      if (replayed < count) {
        for (int k = 0; k < Rule::kStates; ++k) {
          const A decay = rule.template decay<A>(k, count - replayed);
          for (int j = 0; j < kWidth; ++j) states.state[k].at[j] *= decay;
        }
      }
      states.write(table, row, at);
      write(table.weight + row * table.stride + at, w);
    }
  }
}

}  // namespace

template <class Rule, class T>
void catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                   const MissedSteps& missed, int64_t* bad, void* stream) {
  if (n <= 0) return;
  const RowShape shape = shape_of<T>(table, Rule::kStates, nullptr);
  simt::Grid grid = simt::strided_grid_for(n << shape.log2_lanes, kThreads);
  simt::launch("catch_up_rows",
               shape.width == 1 ? catch_up_rows_kernel<Rule, T, 1>
                                : catch_up_rows_kernel<Rule, T, kWide<Acc<T>>>,
               grid, stream, table, rows, n, rule, missed, rule.most_replayed(), bad,
               shape.log2_lanes);
}

SPARSEKIT_INSTANTIATE_RULE(catch_up_rows, Sgd<true>)
SPARSEKIT_INSTANTIATE_RULE(catch_up_rows, Adam<false>)

}  // namespace sparsekit::cuda
