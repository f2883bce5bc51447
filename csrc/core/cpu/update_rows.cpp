#include "sparsekit/update_rows.h"

#include <algorithm>

#include "cpu/sum_rows.h"

namespace sparsekit::cpu {
namespace {

// Mean of squares of a row, added in an order that no instruction set changes.
template <class T>
Acc<T> mean_square(const T* row, int64_t dim) {
  constexpr int64_t kLanes = 16;
  Acc<T> lanes[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lanes[l] += load(row[j + l]) * load(row[j + l]);
  }
  for (; j < dim; ++j) lanes[j % kLanes] += load(row[j]) * load(row[j]);
  Acc<T> total = 0;
  for (const Acc<T> lane : lanes) total += lane;
  return dim == 0 ? total : total / static_cast<Acc<T>>(dim);
}

// One row. `put(value, column)` makes a weight of a value.
template <class Rule, class T, class Put>
inline void update_row(const typename Rule::template Numbers<Acc<T>>& numbers, int64_t dim,
                       const T* __restrict__ g, T* __restrict__ w, Acc<T>* __restrict__ s0,
                       Acc<T>* __restrict__ s1, Acc<T>* __restrict__ s2, const Put& put) {
  using A = Acc<T>;
  if constexpr (Rule::kRowWise) *s0 = Rule::accumulate(*s0, mean_square(g, dim));
  for (int64_t j = 0; j < dim; ++j) {
    A weight = load(w[j]);
    A states[kMostStates];
    if constexpr (Rule::kRowWise) {
      states[0] = *s0;
    } else {
      if constexpr (Rule::kStates > 0) states[0] = s0[j];
      if constexpr (Rule::kStates > 1) states[1] = s1[j];
      if constexpr (Rule::kStates > 2) states[2] = s2[j];
    }
    Rule::step(numbers, load(g[j]), weight, states);
    if constexpr (!Rule::kRowWise) {
      if constexpr (Rule::kStates > 0) s0[j] = states[0];
      if constexpr (Rule::kStates > 1) s1[j] = states[1];
      if constexpr (Rule::kStates > 2) s2[j] = states[2];
    }
    w[j] = put(weight, j);
  }
}

}  // namespace

template <class Rule, class T>
int64_t update_rows(const RowTable<T>& table, const int64_t* rows, const T* grad, int64_t n,
                    const Rule& rule, StepNumber step, Rounding rounding,
                    const ParallelFor& parallel_for) {
  if (rows != nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] < 0 || rows[i] >= table.num_rows) return i;
    }
  }
  using A = Acc<T>;
  const int64_t dim = table.dim, t = *step.step;
  const auto of_step = rule.template at<A>(t);
  const auto row_of = [=](int64_t i) { return rows == nullptr ? i : rows[i]; };
  const auto state = [&table](int k, int64_t row) {
    return k < Rule::kStates ? table.states[k] + row * table.strides[k] : nullptr;
  };

  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(dim, 1));
  parallel_for(0, n, grain, [&, t](int64_t begin, int64_t end) {
    constexpr int64_t kAhead = 8;
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) {
        const int64_t next = row_of(i + kAhead);
        prefetch_row(table.weight + next * dim, dim);
        for (int k = 0; k < Rule::kStates; ++k) {
          prefetch_row(state(k, next), Rule::kRowWise ? 1 : dim);
        }
      }
      const int64_t row = row_of(i);
      auto numbers = of_step;
      if (table.row_step != nullptr) {
        int32_t& count = table.row_step[row];
        count = row_step_of(step.per_row ? int64_t{count} + 1 : t);
        if (step.per_row) numbers = rule.template at<A>(count);
      }
      const auto update = [&](const auto& put) {
        update_row<Rule, T>(numbers, dim, grad + i * dim, table.weight + row * dim, state(0, row),
                            state(1, row), state(2, row), put);
      };
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (rounding.stochastic) {
          Philox4x32 random{};
          update([&, seed = rounding.seed](A value, int64_t column) {
            if (column % 8 == 0) random = rounding_bits(seed, t, row, column / 8);
            return store_at_random(value, bits_of_column(random, column));
          });
          continue;
        }
      }
      update([](A value, int64_t) { return store<T>(value); });
    }
  });
  return -1;
}

#define SPARSEKIT_INSTANTIATE(Rule, T)                                                             \
  template int64_t update_rows(const RowTable<T>&, const int64_t*, const T*, int64_t, const Rule&, \
                               StepNumber, Rounding, const ParallelFor&);
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, float)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, double)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
