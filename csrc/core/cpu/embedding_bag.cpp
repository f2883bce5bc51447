#include "sparsekit/embedding_bag.h"

#include <cmath>

#include "cpu/first_bad.h"
#include "cpu/segment_reduce.h"
#include "cpu/sum_rows.h"

namespace sparsekit::cpu {
namespace {

// What the pooled sum of a bag is divided by; 0 for a bag that pools to zeros.
template <class A>
A divisor(const A* weights, int64_t begin, int64_t end, Combiner combiner) {
  if (begin == end) return 0;
  if (combiner == Combiner::kSum) return 1;
  A total = 0;
  if (weights == nullptr) {
    total = static_cast<A>(end - begin);
  } else {
    for (int64_t run = begin; run < end; run += kSumRun) {  // as rows are added
      const int64_t stop = std::min(end, run + kSumRun);
      A sum = 0;
      for (int64_t i = run; i < stop; ++i) {
        sum += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
      }
      total += sum;
    }
  }
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Division and not multiplication by the inverse, which a tiny divisor would make infinite.
template <class X, class A>
X divided(X x, A divisor) {
  return divisor == 0 ? X{} : x / divisor;
}

int64_t bag_grain(const Bags& bags, int64_t dim) {
  const int64_t elements_per_bag = (bags.n / std::max<int64_t>(bags.num_bags, 1) + 1) * dim;
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(elements_per_bag, 1));
}

// Bags begin, ..., end - 1. Arguments by value, since a compiler must take it that writing to `out`
// changes what is behind a reference.
template <class T>
void pool_bags(const T* weight, int64_t num_rows, int64_t dim, Bags bags,
               const Acc<T>* sample_weights, Combiner combiner, T* out, int64_t begin, int64_t end,
               FirstBad* bad) {
  const auto is_row = [=](int64_t r) { return r >= 0 && r < num_rows; };
  const auto row = [=](int64_t i) -> const T* {
    const int64_t r = bags.rows[i];
    if (is_row(r)) return weight + r * dim;
    if (r >= 0) bad->report(i);
    return nullptr;
  };
  const int64_t distance = rows_ahead<T>(dim);
  const auto ahead = [=](int64_t i) {
    if (i + distance >= bags.n) return;
    // Not checked yet; even the address of a row that is none must not be computed.
    const int64_t r = bags.rows[i + distance];
    if (is_row(r)) prefetch_row(weight + r * dim, dim);
  };
  const auto weight_of = [=](int64_t i) { return sample_weights[i]; };
  for (int64_t b = begin; b < end; ++b) {
    const int64_t first = bags.offsets[b], last = bags.offsets[b + 1];
    const Acc<T> total = divisor(sample_weights, first, last, combiner);
    T* pooled = out + b * dim;
    const auto put = [=](int64_t j, auto sum) { put_at(pooled + j, sum); };
    const auto put_divided = [=](int64_t j, auto sum) { put_at(pooled + j, divided(sum, total)); };
    if (sample_weights != nullptr) {
      sum_rows<T>(first, last, dim, row, weight_of, ahead, put_divided);
    } else if (total == 1) {
      sum_rows<T>(first, last, dim, row, NoScale{}, ahead, put);
    } else {
      sum_rows<T>(first, last, dim, row, NoScale{}, ahead, put_divided);
    }
  }
}

// Gradients of bags as entries of a segment reduction.
template <class T, bool kScaled>
struct BagGradients {
  static constexpr bool scaled = kScaled;
  const T* grad_out;
  int64_t dim;
  Bags bags;
  const Acc<T>* sample_weights;
  Combiner combiner;

  template <class F>
  void visit(int64_t begin, int64_t end, const F& f) const {
    const int64_t* offsets = bags.offsets;
    int64_t b = std::upper_bound(offsets, offsets + bags.num_bags + 1, begin) - offsets - 1;
    for (int64_t i = begin; i < end; ++b) {
      const int64_t stop = std::min(end, offsets[b + 1]);
      const T* row = grad_out + b * dim;
      if constexpr (kScaled) {
        const Acc<T> total = divisor(sample_weights, offsets[b], offsets[b + 1], combiner);
        for (; i < stop; ++i) {
          f(i, row, divided(sample_weights == nullptr ? Acc<T>{1} : sample_weights[i], total));
        }
      } else {
        for (; i < stop; ++i) f(i, row, Acc<T>{1});
      }
    }
  }
};

}  // namespace

int64_t check_offsets(const Bags& bags, const ParallelFor& parallel_for) {
  if (bags.offsets[0] != 0) return 0;
  FirstBad bad;
  parallel_for(0, bags.num_bags, 65536, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      if (bags.offsets[b + 1] < bags.offsets[b] || bags.offsets[b + 1] > bags.n) {
        return bad.report(b + 1);
      }
    }
  });
  if (bad.position() >= 0) return bad.position();
  return bags.offsets[bags.num_bags] == bags.n ? -1 : bags.num_bags;
}

template <class T>
int64_t embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                      const Acc<T>* sample_weights, Combiner combiner, T* out,
                      const ParallelFor& parallel_for) {
  FirstBad bad;
  parallel_for(0, bags.num_bags, bag_grain(bags, dim), [&](int64_t begin, int64_t end) {
    pool_bags(weight, num_rows, dim, bags, sample_weights, combiner, out, begin, end, &bad);
  });
  return bad.position();
}

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows,
                                               const ParallelFor& parallel_for) {
  return SegmentWorkspace<T>(nullptr, bags.n, dim, num_rows, nullptr, parallel_for).bytes;
}

template <class T>
int64_t embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                               const Acc<T>* sample_weights, Combiner combiner, T* grad_weight,
                               void* workspace, const ParallelFor& parallel_for) {
  const auto reduce = [&](const auto& gradients) {
    return reduce_segments(bags.rows, bags.n, dim, num_rows, gradients, workspace, grad_weight,
                           parallel_for);
  };
  if (combiner == Combiner::kSum && sample_weights == nullptr) {
    return reduce(BagGradients<T, false>{grad_out, dim, bags, sample_weights, combiner});
  }
  return reduce(BagGradients<T, true>{grad_out, dim, bags, sample_weights, combiner});
}

// With g the gradient of a bag, d_i = g . x_i and D the divisor:
//   sum: d_i;   mean: (d_i - sum_j w_j d_j / D) / D;   sqrtn: (d_i - w_i sum_j w_j d_j / D^2) / D.
template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t dim,
                                           const Bags& bags, const Acc<T>* sample_weights,
                                           Combiner combiner, Acc<T>* grad_sample_weights,
                                           const ParallelFor& parallel_for) {
  parallel_for(0, bags.num_bags, bag_grain(bags, dim), [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = bags.offsets[b], last = bags.offsets[b + 1];
      const T* g = grad_out + b * dim;
      Acc<T> weighted = 0;
      for (int64_t i = first; i < last; ++i) {
        Acc<T> dot = 0;
        if (bags.rows[i] >= 0) {
          const T* x = weight + bags.rows[i] * dim;
          for (int64_t j = 0; j < dim; ++j) dot += load(g[j]) * load(x[j]);
        }
        grad_sample_weights[i] = dot;
        weighted += sample_weights[i] * dot;
      }
      if (combiner == Combiner::kSum) continue;
      const Acc<T> total = divisor(sample_weights, first, last, combiner);
      for (int64_t i = first; i < last; ++i) {
        Acc<T> shared = divided(weighted, total);
        if (combiner == Combiner::kSqrtn) shared *= divided(sample_weights[i], total);
        grad_sample_weights[i] = divided(grad_sample_weights[i] - shared, total);
      }
    }
  });
}

#define SPARSEKIT_INSTANTIATE(T)                                                                   \
  template int64_t embedding_bag(const T*, int64_t, int64_t, const Bags&, const Acc<T>*, Combiner, \
                                 T*, const ParallelFor&);                                          \
  template int64_t embedding_bag_backward_workspace_bytes<T>(const Bags&, int64_t, int64_t,        \
                                                             const ParallelFor&);                  \
  template int64_t embedding_bag_backward(const T*, int64_t, int64_t, const Bags&, const Acc<T>*,  \
                                          Combiner, T*, void*, const ParallelFor&);                \
  template void embedding_bag_backward_sample_weights(const T*, const T*, int64_t, const Bags&,    \
                                                      const Acc<T>*, Combiner, Acc<T>*,            \
                                                      const ParallelFor&);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
