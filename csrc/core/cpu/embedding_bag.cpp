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
    for (int64_t i = begin; i < end; ++i) {
      total += combiner == Combiner::kMean ? weights[i] : weights[i] * weights[i];
    }
  }
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Division and not multiplication by the inverse, which a tiny divisor would make infinite.
template <class A>
A divided(A x, A divisor) {
  return divisor == 0 ? A{0} : x / divisor;
}

int64_t bag_grain(const Bags& bags, int64_t dim) {
  const int64_t elements_per_bag = (bags.n / std::max<int64_t>(bags.num_bags, 1) + 1) * dim;
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(elements_per_bag, 1));
}

int64_t first_bad_row(const Bags& bags, int64_t num_rows, const ParallelFor& parallel_for) {
  FirstBad bad;
  parallel_for(0, bags.n, 65536, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (bags.rows[i] >= num_rows) return bad.report(i);
    }
  });
  return bad.position();
}

template <class T>
struct BackwardWorkspace {
  SegmentWorkspace<T> segments;
  int64_t* bag;   // [n] bag of each position
  Acc<T>* scale;  // [n] what the bag's gradient is multiplied by at each position

  static int64_t bytes(const Bags& bags, int64_t dim, int64_t num_rows) {
    return SegmentWorkspace<T>::bytes(bags.n, dim, num_rows) +
           bags.n * static_cast<int64_t>(sizeof(int64_t) + sizeof(Acc<T>));
  }

  BackwardWorkspace(void* memory, const Bags& bags, int64_t dim, int64_t num_rows)
      : segments(static_cast<int64_t*>(memory) + bags.n, bags.n, dim, num_rows),
        bag(static_cast<int64_t*>(memory)),
        scale(segments.last_part + SegmentWorkspace<T>::num_chunks(bags.n) * dim) {}
};

}  // namespace

int64_t check_offsets(const Bags& bags) {
  if (bags.offsets[0] != 0) return 0;
  for (int64_t b = 0; b < bags.num_bags; ++b) {
    if (bags.offsets[b + 1] < bags.offsets[b] || bags.offsets[b + 1] > bags.n) return b + 1;
  }
  return bags.offsets[bags.num_bags] == bags.n ? -1 : bags.num_bags;
}

template <class T>
int64_t embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                      const Acc<T>* sample_weights, Combiner combiner, T* out,
                      const ParallelFor& parallel_for) {
  const int64_t bad = first_bad_row(bags, num_rows, parallel_for);
  if (bad >= 0) return bad;
  const auto row = [=](int64_t i) {
    return bags.rows[i] < 0 ? nullptr : weight + bags.rows[i] * dim;
  };
  const auto ahead = [=](int64_t i) {
    if (i < bags.n) prefetch_row(row(i), dim);
  };
  parallel_for(0, bags.num_bags, bag_grain(bags, dim), [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = bags.offsets[b], last = bags.offsets[b + 1];
      const Acc<T> total = divisor(sample_weights, first, last, combiner);
      T* pooled = out + b * dim;
      const auto put = [=](int64_t j, Acc<T> sum) { pooled[j] = store<T>(sum); };
      const auto put_divided = [=](int64_t j, Acc<T> sum) {
        pooled[j] = store<T>(divided(sum, total));
      };
      if (sample_weights != nullptr) {
        const auto weight_of = [=](int64_t i) { return sample_weights[i]; };
        sum_rows<T>(first, last, dim, row, weight_of, ahead, put_divided);
      } else if (total == 1) {
        sum_rows<T>(first, last, dim, row, one<T>, ahead, put);
      } else {
        sum_rows<T>(first, last, dim, row, one<T>, ahead, put_divided);
      }
    }
  });
  return -1;
}

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows) {
  return BackwardWorkspace<T>::bytes(bags, dim, num_rows);
}

template <class T>
int64_t embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                               const Acc<T>* sample_weights, Combiner combiner, T* grad_weight,
                               void* workspace, const ParallelFor& parallel_for) {
  const BackwardWorkspace<T> work(workspace, bags, dim, num_rows);
  const SegmentWorkspace<T>& segments = work.segments;
  const int64_t bad = sort_by_segment(bags.rows, bags.n, num_rows, segments.start, segments.order);
  if (bad >= 0) return bad;

  parallel_for(0, bags.num_bags, 4096, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t first = bags.offsets[b], last = bags.offsets[b + 1];
      const Acc<T> total = divisor(sample_weights, first, last, combiner);
      for (int64_t i = first; i < last; ++i) {
        work.bag[i] = b;
        work.scale[i] = divided(sample_weights == nullptr ? Acc<T>{1} : sample_weights[i], total);
      }
    }
  });
  reduce_segments<T>(
      bags.rows, dim, num_rows, [=](int64_t i) { return grad_out + work.bag[i] * dim; },
      [=](int64_t i) { return work.scale[i]; }, segments, grad_weight, parallel_for);
  return -1;
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
  template int64_t embedding_bag_backward_workspace_bytes<T>(const Bags&, int64_t, int64_t);       \
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
