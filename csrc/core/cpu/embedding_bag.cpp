#include "sparsekit/embedding_bag.h"

#include <limits>

#include "cpu/bags.h"
#include "sparsekit/group.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::cpu {
namespace {

// Describes the bags as a group with a single feature.
template <class T>
FeatureBags<T> only_feature(const Bags& bags, const Acc<T>* sample_weights, Combiner combiner,
                            int64_t dim) {
  FeatureBags<T> feature{};
  feature.num_bags = bags.num_bags;
  feature.bags = {bags.offsets, nullptr};
  feature.combiner = combiner;
  feature.sample_weights = sample_weights;
  feature.stride = dim;
  return feature;
}

template <class T>
SummedTable<T> only_table(const FeatureBags<T>* feature, int64_t num_rows, int64_t dim, T* grad) {
  return {feature, 1, 0, feature->num_entries(), num_rows, dim, grad, nullptr, nullptr};
}

}  // namespace

int64_t check_offsets(const Bags& bags, const ParallelFor& parallel_for) {
  if (bags.offsets[0] != 0) return 0;
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const Source source{nullptr, bags.offsets, true, true, bags.n, bags.num_bags};
  const int64_t bad = check_bags(source, 0, bags.num_bags, kAny, parallel_for).position;
  if (bad >= 0) return bad;
  return bags.offsets[bags.num_bags] == bags.n ? -1 : bags.num_bags;
}

template <class T>
int64_t embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                      const Acc<T>* sample_weights, Combiner combiner, T* out,
                      const ParallelFor& parallel_for) {
  FeatureBags<T> feature = only_feature<T>(bags, sample_weights, combiner, dim);
  feature.out = out;
  const PooledTable<T> table{weight, num_rows, dim, dim, nullptr, 0, nullptr, {}};
  alignas(64) char workspace[64];  // large enough, since there are no initial vectors
  return group_embedding_bag<T>(&table, &feature, 1, {bags.rows, nullptr}, workspace, parallel_for);
}

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows,
                                               const ParallelFor& parallel_for) {
  const FeatureBags<T> feature = only_feature<T>(bags, nullptr, Combiner::kSum, dim);
  const SummedTable<T> table = only_table<T>(&feature, num_rows, dim, nullptr);
  int32_t order = 0;
  return group_embedding_bag_backward_workspace_bytes(&table, 1, &order, parallel_for);
}

template <class T>
int64_t embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                               const Acc<T>* sample_weights, Combiner combiner, T* grad_weight,
                               void* workspace, const ParallelFor& parallel_for) {
  FeatureBags<T> feature = only_feature<T>(bags, sample_weights, combiner, dim);
  feature.grad = grad_out;
  const SummedTable<T> table = only_table<T>(&feature, num_rows, dim, grad_weight);
  int32_t order = 0;
  return group_embedding_bag_backward(&table, 1, {bags.rows, nullptr}, 1, &order, workspace,
                                      parallel_for);
}

// The gradient of weight i in a bag, where g is the gradient of the bag's vector, d_i = g . x_i,
// and D is the divisor:
//   sum: d_i;   mean: (d_i - sum_j w_j d_j / D) / D;   sqrtn: (d_i - w_i sum_j w_j d_j / D^2) / D.
template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t dim,
                                           const Bags& bags, const Acc<T>* sample_weights,
                                           Combiner combiner, Acc<T>* grad_sample_weights,
                                           const ParallelFor& parallel_for) {
  parallel_for(0, bags.num_bags, bag_grain(bags.n, bags.num_bags, dim),
               [=](int64_t begin, int64_t end) {
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

SPARSEKIT_INSTANTIATE(embedding_bag)
SPARSEKIT_INSTANTIATE(embedding_bag_backward_workspace_bytes)
SPARSEKIT_INSTANTIATE(embedding_bag_backward)
SPARSEKIT_INSTANTIATE(embedding_bag_backward_sample_weights)

}  // namespace sparsekit::cpu
