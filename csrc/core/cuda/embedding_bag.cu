#include "sparsekit/embedding_bag.h"

#include <algorithm>

#include "cuda/bags.cuh"
#include "cuda/pool_bags.cuh"
#include "cuda/segment_reduce.cuh"

namespace sparsekit::cuda {
namespace {

// The launch bounds request two blocks per multiprocessor. Without them, ptxas aims for more blocks
// and spills a few registers.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256, 2) pool_bags_kernel(Pooling<T> in, LongBags<T> long_bags) {
  pool_own_bag<kWidth>(in, long_bags, long_bags.capacity > 0 && simt::column() == 0,
                       tile_of_thread(in.log2_lanes), first_element(kWidth, in.log2_lanes));
}
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256, 2)
    pool_short_bags_kernel(Pooling<T> in, LongBags<T> long_bags) {
  pool_own_short_bags<kWidth>(in, long_bags, long_bags.capacity > 0 && simt::column() == 0,
                              tile_of_thread(in.log2_lanes) * kBags,
                              first_element(kWidth, in.log2_lanes));
}

// Pools the parts of long bags. Each tile handles one part.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256, 2) pool_parts_kernel(Pooling<T> in, LongBags<T> long_bags) {
  const int64_t slot = tile_of_thread(in.log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  pool_part<kWidth>(in, long_bags, slot, long_bags.parts[slot].bag,
                    first_element(kWidth, in.log2_lanes));
}
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256, 2)
    add_parts_kernel(Pooling<T> in, LongBags<T> long_bags, Round round) {
  const int64_t slot = tile_of_thread(in.log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  add_to_part<kWidth>(in, long_bags, round, slot, long_bags.parts[slot].bag,
                      first_element(kWidth, in.log2_lanes));
}

template <class T, int kWidth>
void pool_bags(const Pooling<T>& in, const LongBags<T>& long_bags, const RowShape& shape,
               void* stream) {
  clear_parts(long_bags, stream);
  const int64_t tiles = in.bags.num_bags + 1;
  if (in.bags.n < kShort * in.bags.num_bags) {
    simt::launch("embedding_bag: short bags", pool_short_bags_kernel<T, kWidth>,
                 grid_for_rows((tiles + kBags - 1) / kBags, shape), stream, in, long_bags);
  } else {
    simt::launch("embedding_bag: bags", pool_bags_kernel<T, kWidth>, grid_for_rows(tiles, shape),
                 stream, in, long_bags);
  }
  if (long_bags.capacity == 0) return;
  const simt::Grid grid = grid_for_rows(long_bags.capacity, shape);
  simt::launch("embedding_bag: parts", pool_parts_kernel<T, kWidth>, grid, stream, in, long_bags);
  for_each_round(in.bags.n, [&](Round round) {
    simt::launch("embedding_bag: sums of parts", add_parts_kernel<T, kWidth>, grid, stream, in,
                 long_bags, round);
  });
}

// ---- backward ----

// Sums over a bag's entries: `total` is the total weight, and `weighted` is the weighted sum of the
// dot products if `dots` is given. All lanes of a warp must call sum_bag with the same bag.
template <class A>
struct BagSums {
  A total;
  A weighted;
};

template <class A>
SPARSEKIT_DEVICE BagSums<A> sum_bag(const A* weights, const A* dots, const Range& range,
                                    Combiner combiner) {
  BagSums<A> sums{0, 0};
  for (int64_t i = range.begin + simt::lane(); i < range.end; i += simt::kWarp) {
    sums.total += in_total(weights[i], combiner);
    if (dots != nullptr) sums.weighted += weights[i] * simt::load(dots + i);
  }
  for (int step = simt::kWarp / 2; step > 0; step /= 2) {
    sums.total += simt::warp_shuffle(sums.total, simt::lane() ^ step);
    sums.weighted += simt::warp_shuffle(sums.weighted, simt::lane() ^ step);
  }
  return sums;
}

// Computes divisors[bag] for weighted bags. Each warp handles one bag.
template <class A>
SPARSEKIT_KERNEL bag_divisors_kernel(Bags bags, const A* sample_weights, Combiner combiner,
                                     A* divisors) {
  const int64_t bag = simt::global_thread() / simt::kWarp;
  if (bag >= bags.num_bags) return;
  const Range range = bag_range(bags, bag);
  const BagSums<A> sums = sum_bag<A>(sample_weights, nullptr, range, combiner);
  if (simt::lane() == 0) {
    divisors[bag] = divisor(sums.total, range.end - range.begin, combiner);
  }
}

// The entries of the segment sum over rows. An entry's value is its bag's scaled gradient.
template <class A>
struct BagEntries {
  int32_t* bag;  // [n] bag of each entry, or -1 if no bag has it; null if there are sample weights
  ScaledRow<A>* scaled;  // [n] with sample weights, otherwise [num_bags]; null if nothing is scaled
  A* divisors;           // [num_bags] divisors of weighted bags; null if no such bag is divided
};

// Prepares entries and checks offsets, with one thread per entry, bag and offset.
template <class A>
SPARSEKIT_KERNEL bag_entries_kernel(Bags bags, const A* sample_weights, Combiner combiner,
                                    BagEntries<A> entries, int64_t* bad_offset) {
  const int64_t i = simt::global_thread();
  if (i <= bags.num_bags) check_offset(bags, i, bad_offset);
  if (sample_weights == nullptr && entries.scaled != nullptr && i < bags.num_bags) {
    const Range range = bag_range(bags, i);
    const int64_t count = range.end - range.begin;
    entries.scaled[i] = ScaledRow<A>{
        static_cast<int32_t>(i), divided(A{1}, divisor(static_cast<A>(count), count, combiner))};
  }
  if (i >= bags.n) return;
  const int64_t bag = find_bag(bags, i, 0);
  if (sample_weights == nullptr) {
    entries.bag[i] = static_cast<int32_t>(bag);
  } else if (bag < 0) {
    entries.scaled[i] = ScaledRow<A>{-1, A{0}};
  } else {
    const A by = entries.divisors == nullptr ? A{1} : entries.divisors[bag];
    entries.scaled[i] = ScaledRow<A>{static_cast<int32_t>(bag), divided(sample_weights[i], by)};
  }
}

template <class T>
struct BackwardWorkspace {
  SegmentWorkspace<T> segments;
  int32_t* bag;
  ScaledRow<Acc<T>>* scaled;
  Acc<T>* divisors;

  BackwardWorkspace(Arena& arena, const Bags& bags, int64_t dim, int64_t num_rows)
      : segments(arena, bags.n, dim, num_rows),
        bag(arena.take<int32_t>(bags.n)),
        scaled(arena.take<ScaledRow<Acc<T>>>(std::max(bags.n, bags.num_bags))),
        divisors(arena.take<Acc<T>>(bags.num_bags)) {}
};

// ---- backward for the sample weights ----

// Computes grad[i] as the dot product of entry i's row and its bag's gradient. Each tile handles
// kInFlight entries.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    entry_dots_kernel(const T* grad_out, Pooling<T> in, Acc<T>* grad) {
  const int64_t first = tile_of_thread(in.log2_lanes) * kInFlight;
  const int lanes = 1 << in.log2_lanes;
  const int lane_in_tile = simt::lane() & (lanes - 1);
  if (simt::global_thread() <= in.bags.num_bags) {
    check_offset(in.bags, simt::global_thread(), in.errors.bad_offset);
  }
  int64_t row[kInFlight];
  for (int j = 0; j < kInFlight; ++j) row[j] = first + j < in.bags.n ? in.bags.rows[first + j] : -1;
  // Pointers to the gradients and rows to multiply; a null pointer stands for zeros.
  const T *g[kInFlight], *x[kInFlight];
  int64_t bag = -1;
  for (int j = 0; j < kInFlight; ++j) {
    const int64_t i = first + j;
    g[j] = x[j] = nullptr;
    if (i >= in.bags.n) continue;
    // Keep the previous entry's bag if it also contains this entry, as is usually the case.
    const bool same = bag >= 0 && i < in.bags.offsets[bag + 1];
    if (!same) bag = find_bag(in.bags, i, bag < 0 ? 0 : bag + 1);
    if (row[j] < 0 || row[j] >= in.num_rows || bag < 0) continue;
    g[j] = grad_out + bag * in.dim;
    x[j] = in.weight + row[j] * in.dim;
  }
  Acc<T> dot[kInFlight] = {};
  for (int64_t element = lane_in_tile * kWidth; element < in.dim; element += lanes * kWidth) {
    RowPiece<T, kWidth> of_g[kInFlight], of_x[kInFlight];
    for (int j = 0; j < kInFlight; ++j) {
      of_g[j] = of_x[j] = {};
      if (g[j] == nullptr) continue;
      of_g[j].read(g[j] + element);
      of_x[j].read(x[j] + element);
    }
    for (int j = 0; j < kInFlight; ++j) {
      for (int l = 0; l < kWidth; ++l) dot[j] += load(of_g[j].at(l)) * load(of_x[j].at(l));
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
    for (int j = 0; j < kInFlight; ++j) dot[j] += simt::warp_shuffle(dot[j], simt::lane() ^ step);
  }
  if (lane_in_tile != 0) return;
  for (int j = 0; j < kInFlight; ++j) {
    if (row[j] >= in.num_rows) simt::atomic_min(in.errors.bad_row, first + j);
    if (first + j < in.bags.n) grad[first + j] = dot[j];
  }
}

// Computes the gradient from the dot products, with the formula in cpu/embedding_bag.cpp. Each warp
// handles one bag. With bad offsets, bags may overlap, so another warp may write the same
// gradients: access them only with relaxed loads and stores.
template <class A>
SPARSEKIT_KERNEL normalise_dots_kernel(Bags bags, const A* sample_weights, Combiner combiner,
                                       A* grad) {
  const int64_t bag = simt::global_thread() / simt::kWarp;
  if (bag >= bags.num_bags) return;
  const Range range = bag_range(bags, bag);
  const BagSums<A> sums = sum_bag<A>(sample_weights, grad, range, combiner);
  const A by = divisor(sums.total, range.end - range.begin, combiner);
  for (int64_t i = range.begin + simt::lane(); i < range.end; i += simt::kWarp) {
    A shared = divided(sums.weighted, by);
    if (combiner == Combiner::kSqrtn) shared *= divided(sample_weights[i], by);
    simt::store(grad + i, divided(simt::load(grad + i) - shared, by));
  }
}

}  // namespace

template <class T>
int64_t embedding_bag_workspace_bytes(const Bags& bags, int64_t dim) {
  return Arena::bytes_of<LongBags<T>>(bags.n, dim);
}

template <class T>
void embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                   const Acc<T>* sample_weights, Combiner combiner, T* out, const BagErrors& errors,
                   void* workspace, void* stream) {
  Arena arena(workspace);
  const LongBags<T> long_bags(arena, bags.n, dim);
  const RowShape shape = row_shape<T>(dim, weight, out);
  const Pooling<T> in{weight, num_rows,         dim, bags, sample_weights, combiner,
                      errors, shape.log2_lanes, out};
  const auto run = shape.width == 1 ? pool_bags<T, 1> : pool_bags<T, kWide<T>>;
  run(in, long_bags, shape, stream);
}

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows) {
  return Arena::bytes_of<BackwardWorkspace<T>>(bags, dim, num_rows);
}

template <class T>
void embedding_bag_backward(const T* grad_out, int64_t num_rows, int64_t dim, const Bags& bags,
                            const Acc<T>* sample_weights, Combiner combiner, bool deterministic,
                            T* grad_weight, const BagErrors& errors, void* workspace,
                            void* stream) {
  using A = Acc<T>;
  Arena arena(workspace);
  const BackwardWorkspace<T> work(arena, bags, dim, num_rows);
  const bool weighted = sample_weights != nullptr, divides = combiner != Combiner::kSum;
  const BagEntries<A> entries{weighted ? nullptr : work.bag,
                              weighted || divides ? work.scaled : nullptr,
                              weighted && divides ? work.divisors : nullptr};
  if (entries.divisors != nullptr) {
    simt::launch("embedding_bag: divisors", bag_divisors_kernel<A>,
                 simt::grid_for(bags.num_bags * simt::kWarp), stream, bags, sample_weights,
                 combiner, work.divisors);
  }
  simt::launch("embedding_bag: entries", bag_entries_kernel<A>,
               simt::grid_for(std::max(bags.n, bags.num_bags + 1)), stream, bags, sample_weights,
               combiner, entries, errors.bad_offset);
  const Segments segments{bags.rows, entries.bag, bags.n, num_rows, errors.bad_row};
  reduce_segments<T>(segments, {grad_out, entries.scaled, dim, dim}, deterministic, grad_weight,
                     work.segments, stream);
}

template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t num_rows,
                                           int64_t dim, const Bags& bags,
                                           const Acc<T>* sample_weights, Combiner combiner,
                                           Acc<T>* grad_sample_weights, const BagErrors& errors,
                                           void* stream) {
  const RowShape shape = row_shape<T>(dim, weight, grad_out);
  const Pooling<T> in{weight, num_rows,         dim,    bags, sample_weights, combiner,
                      errors, shape.log2_lanes, nullptr};
  const int64_t tiles = (bags.n + kInFlight - 1) / kInFlight;
  const simt::Grid grid = simt::grid_for(std::max(tiles << shape.log2_lanes, bags.num_bags + 1));
  const auto dots = shape.width == 1 ? entry_dots_kernel<T, 1> : entry_dots_kernel<T, kWide<T>>;
  simt::launch("embedding_bag: dots", dots, grid, stream, grad_out, in, grad_sample_weights);
  if (combiner == Combiner::kSum) return;
  simt::launch("embedding_bag: normalise", normalise_dots_kernel<Acc<T>>,
               simt::grid_for(bags.num_bags * simt::kWarp), stream, bags, sample_weights, combiner,
               grad_sample_weights);
}

SPARSEKIT_INSTANTIATE(embedding_bag_workspace_bytes)
SPARSEKIT_INSTANTIATE(embedding_bag)
SPARSEKIT_INSTANTIATE(embedding_bag_backward_workspace_bytes)
SPARSEKIT_INSTANTIATE(embedding_bag_backward)
SPARSEKIT_INSTANTIATE(embedding_bag_backward_sample_weights)

}  // namespace sparsekit::cuda
