#include "sparsekit/update_rows.h"

#include <algorithm>

#include "cpu/sum_rows.h"

namespace sparsekit::cpu {
namespace {

// Returns the means over element(0), ..., element(dim - 1) that the rule needs. The order of
// additions is the same for all instruction sets.
template <class Rule, class A, class Element>
RowMeans<A> mean_of_row(int64_t dim, const Element& element) {
  constexpr int64_t kLanes = 16;
  A first[kLanes] = {}, second[kLanes] = {};
  const auto add = [&](int64_t j, int64_t lane) {
    const RowMeans<A> one = element(j);
    first[lane] += one.first;
    if constexpr (Rule::kRowMeans > 1) second[lane] += one.second;
  };
  int64_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) add(j + l, l);
  }
  for (; j < dim; ++j) add(j, j % kLanes);
  const auto mean = [dim](const A* lanes) {
    A total = 0;
    for (int64_t l = 0; l < kLanes; ++l) total += lanes[l];
    return dim == 0 ? total : total / static_cast<A>(dim);
  };
  return {mean(first), mean(second)};
}

// Updates one row. `put(value, column)` rounds a new weight to T.
template <class Rule, class T, class Put>
inline void update_row(const typename Rule::template StepConstants<Acc<T>>& numbers, int64_t dim,
                       const T* __restrict__ g, T* __restrict__ w, Acc<T>* __restrict__ s0,
                       Acc<T>* __restrict__ s1, Acc<T>* __restrict__ s2, const Put& put) {
  using A = Acc<T>;
  constexpr int kOwn = kElementStates<Rule>;
  const auto get_states = [&](int64_t j, A* states) {
    if constexpr (kOwn > 0) states[0] = s0[j];
    if constexpr (kOwn > 1) states[1] = s1[j];
    if constexpr (kOwn > 2) states[2] = s2[j];
  };
  A of_row = 0;
  if constexpr (Rule::kRowMeans > 0) {
    const RowMeans<A> means = mean_of_row<Rule, A>(dim, [&](int64_t j) {
      A states[kMostStates];
      get_states(j, states);
      return Rule::of_element(numbers, load(g[j]), load(w[j]), states);
    });
    A* const state = Rule::kRowWise ? (kOwn == 0 ? s0 : s1) : &of_row;
    *state = of_row = Rule::of_row(numbers, means, *state);
  }
  for (int64_t j = 0; j < dim; ++j) {
    A weight = load(w[j]);
    A states[kMostStates];
    get_states(j, states);
    if constexpr (Rule::kRowMeans > 0) states[kOwn] = of_row;
    Rule::step(numbers, load(g[j]), weight, states);
    if constexpr (kOwn > 0) s0[j] = states[0];
    if constexpr (kOwn > 1) s1[j] = states[1];
    if constexpr (kOwn > 2) s2[j] = states[2];
    w[j] = put(weight, j);
  }
}

// Updates the rows that the gradients [begin, end) of one table belong to.
template <class Rule, class T>
void update_some(const RowTable<T>& table, const RowGradients<T>& gradients, int64_t begin,
                 int64_t end, const Rule& rule,
                 const typename Rule::template StepConstants<Acc<T>>& of_step, int64_t t,
                 bool per_row, Rounding rounding) {
  using A = Acc<T>;
  const int64_t dim = table.dim;
  const int64_t* rows = gradients.rows;
  const auto row_of = [=](int64_t i) { return rows == nullptr ? i : rows[i]; };
  const auto state = [&table](int k, int64_t row) {
    return k < Rule::kStates ? table.states[k] + row * table.strides[k] : nullptr;
  };
  const auto ask_for = [&](int64_t i) {
    const int64_t row = row_of(i);
    prefetch_row(table.weight + row * table.stride, dim);
    for (int k = 0; k < Rule::kStates; ++k) {
      prefetch_row(state(k, row), k < kElementStates<Rule> ? dim : 1);
    }
  };
  constexpr int64_t kAhead = 16;
  for (int64_t i = begin; i < std::min(begin + kAhead, end); ++i) ask_for(i);
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) ask_for(i + kAhead);
    const int64_t row = row_of(i);
    auto numbers = of_step;
    if (table.row_step != nullptr) {
      int32_t& count = table.row_step[row];
      count = row_step_of(per_row ? int64_t{count} + 1 : t);
      if (per_row) numbers = rule.template at<A>(count);
    }
    const auto update = [&](const auto& put) {
      update_row<Rule, T>(numbers, dim, gradients.grad + i * dim, table.weight + row * table.stride,
                          state(0, row), state(1, row), state(2, row), put);
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
}

}  // namespace

template <class Rule, class T>
BadRow update_rows(const SteppedTable<T>* tables, const RowGradients<T>* gradients,
                   int64_t num_tables, const Rule& rule, StepNumber number, Rounding rounding,
                   const ParallelFor& parallel_for) {
  int64_t elements = 0;  // total elements in all gradients; an empty row counts as one element
  const auto width = [tables](int64_t k) { return std::max<int64_t>(tables[k].table.dim, 1); };
  for (int64_t k = 0; k < num_tables; ++k) {
    const auto& [rows, grad, n] = gradients[k];
    elements += n * width(k);
    if (rows == nullptr) continue;
    for (int64_t i = 0; i < n; ++i) {
      if (rows[i] < 0 || rows[i] >= tables[k].table.num_rows) return {k, i};
    }
  }
  // Each thread updates the rows whose first element is in its range of elements.
  parallel_for(0, elements, 16384, [&](int64_t begin, int64_t end) {
    int64_t before = 0, known_step = 0;
    typename Rule::template StepConstants<Acc<T>> of_step{};
    for (int64_t k = 0; k < num_tables && before < end; ++k) {
      const int64_t each = width(k), n = gradients[k].n, first_element = before;
      before += n * each;
      if (before <= begin || n == 0) continue;
      const auto row_at = [&](int64_t element) {
        return std::clamp<int64_t>((element - first_element + each - 1) / each, 0, n);
      };
      const int64_t first = begin <= first_element ? 0 : row_at(begin);
      const int64_t last = end >= before ? n : row_at(end);
      const int64_t t = number.get(tables[k].step);
      if (t != known_step) of_step = rule.template at<Acc<T>>(t);
      known_step = t;
      update_some(tables[k].table, gradients[k], first, last, rule, of_step, t, number.per_row,
                  rounding);
    }
  });
  return {};
}

SPARSEKIT_INSTANTIATE_RULES(update_rows)

}  // namespace sparsekit::cpu
