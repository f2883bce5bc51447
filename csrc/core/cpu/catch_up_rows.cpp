#include "sparsekit/catch_up_rows.h"

#include <algorithm>

namespace sparsekit::cpu {
namespace {

// Number of columns advanced together, small enough to stay in registers or in the first-level
// cache.
constexpr int64_t kBlock = 32;

// Advances `width` columns of a row by `count` steps. The first `replayed` steps are computed one
// by one. The remaining steps change only the states, not the weights.
template <class Rule, class T>
void replay(const Rule& rule, const double* numbers, int64_t replayed, int64_t count, int64_t width,
            T* w, Acc<T>* const* states) {
  using A = Acc<T>;
  constexpr int kStates = Rule::kStates;
  A weight[kBlock] = {}, state[kStates][kBlock] = {};
  for (int64_t j = 0; j < width; ++j) weight[j] = load(w[j]);
  for (int k = 0; k < kStates; ++k) std::copy_n(states[k], width, state[k]);
  for (int64_t i = 0; i < replayed; ++i) {
    const auto of_step = rule.template without_gradient<A>(numbers[2 * i], numbers[2 * i + 1]);
    for (int64_t j = 0; j < kBlock; ++j) {
      A one[kStates];
      for (int k = 0; k < kStates; ++k) one[k] = state[k][j];
      Rule::step(of_step, A{0}, weight[j], one);
      weight[j] = load(store<T>(weight[j]));  // round as if the weight were stored after each step
      for (int k = 0; k < kStates; ++k) state[k][j] = one[k];
    }
  }
  if (replayed < count) {
    for (int k = 0; k < kStates; ++k) {
      const A decay = rule.template decay<A>(k, count - replayed);
      for (int64_t j = 0; j < kBlock; ++j) state[k][j] *= decay;
    }
  }
  for (int64_t j = 0; j < width; ++j) w[j] = store<T>(weight[j]);
  for (int k = 0; k < kStates; ++k) std::copy_n(state[k], width, states[k]);
}

}  // namespace

template <class Rule, class T>
int64_t catch_up_rows(const RowTable<T>& table, const int64_t* rows, int64_t n, const Rule& rule,
                      const MissedSteps& missed, const ParallelFor& parallel_for) {
  if (rows != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] >= table.num_rows) return i;
    }
  }
  const int64_t last = missed.last_step(), most = rule.most_replayed(), dim = table.dim;
  parallel_for(0, n, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows == nullptr ? i : rows[i];
      if (row < 0 || table.row_step[row] == 0) continue;
      const int64_t first = std::max(int64_t{table.row_step[row]} + 1, missed.first_step);
      const int64_t count = last + 1 - first;
      if (count <= 0) continue;
      const double* numbers = missed.numbers + 2 * (first - missed.first_step);
      for (int64_t column = 0; column < dim; column += kBlock) {
        Acc<T>* states[kMostStates];
        for (int k = 0; k < Rule::kStates; ++k) {
          states[k] = table.states[k] + row * table.strides[k] + column;
        }
        replay(rule, numbers, std::min(count, most), count, std::min(kBlock, dim - column),
               table.weight + row * table.stride + column, states);
      }
      table.row_step[row] = static_cast<int32_t>(last);
    }
  });
  return -1;
}

SPARSEKIT_INSTANTIATE_RULE(catch_up_rows, Sgd<true>)
SPARSEKIT_INSTANTIATE_RULE(catch_up_rows, Adam<false>)

}  // namespace sparsekit::cpu
