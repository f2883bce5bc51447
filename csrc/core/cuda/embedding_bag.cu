#include <cmath>

#include "cuda/segment_reduce.cuh"
#include "sparsekit/embedding_bag.h"

namespace sparsekit::cuda {
namespace {

// Entries of a bag that one tile pools. A longer bag is cut into parts of this many, which are
// pooled by tiles of their own and then put together in order, kPart at a time.
constexpr int64_t kPart = 256;

struct Range {
  int64_t begin;
  int64_t end;
};

// Entries of a bag, none if its offsets are bad.
SPARSEKIT_DEVICE Range bag_range(const Bags& bags, int64_t bag) {
  const Range range{bags.offsets[bag], bags.offsets[bag + 1]};
  const bool good = 0 <= range.begin && range.begin <= range.end && range.end <= bags.n;
  return good ? range : Range{0, 0};
}

// Reports offsets[position], position <= num_bags, if it breaks the rule of Bags.
SPARSEKIT_DEVICE void check_offset(const Bags& bags, int64_t position, int64_t* bad_offset) {
  const int64_t offset = bags.offsets[position];
  const int64_t least = position == 0 ? 0 : bags.offsets[position - 1];
  const bool good = least <= offset && offset <= (position == 0 ? 0 : bags.n) &&
                    (position < bags.num_bags || offset == bags.n);
  if (!good) simt::atomic_min(bad_offset, position);
}

// The bag >= from with entry i, or -1. All offsets up to `from` are taken to be <= i.
SPARSEKIT_DEVICE int64_t find_bag(const Bags& bags, int64_t i, int64_t from) {
  int64_t low = from, high = bags.num_bags;  // offsets[low] <= i, or low == from
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (bags.offsets[middle] <= i) {
      low = middle;
    } else {
      high = middle;
    }
  }
  if (low >= bags.num_bags) return -1;
  const Range range = bag_range(bags, low);
  return range.begin <= i && i < range.end ? low : -1;
}

// What a weight adds to the total that the divisor comes from.
template <class A>
SPARSEKIT_DEVICE A in_total(A weight, Combiner combiner) {
  return combiner == Combiner::kMean ? weight : weight * weight;
}

// What a pooled sum is divided by; 0 for a bag that pools to zeros.
template <class A>
SPARSEKIT_DEVICE A divisor(A total, int64_t count, Combiner combiner) {
  if (count == 0) return A{0};
  if (combiner == Combiner::kSum) return A{1};
  return combiner == Combiner::kMean ? total : std::sqrt(total);
}

// Division and not multiplication by the inverse, which a tiny divisor would make infinite.
template <class A>
SPARSEKIT_DEVICE A divided(A x, A by) {
  return by == 0 ? A{0} : x / by;
}

// ---- forward ----

template <class T>
struct Pooling {
  const T* weight;
  int64_t num_rows;
  int64_t dim;
  Bags bags;
  const Acc<T>* sample_weights;  // may be null
  Combiner combiner;
  BagErrors errors;
  int log2_lanes;
};

// sum = the weighted rows of the `count` entries from `begin`, at most kPart, added in order;
// total = what their weights add to the total.
template <class T, int kWidth>
SPARSEKIT_DEVICE void pool(const Pooling<T>& in, int64_t begin, int count, int64_t element,
                           Acc<T> (&sum)[kWidth], Acc<T>& total) {
  int64_t next_row[kInFlight];
  Acc<T> next_weight[kInFlight];
  const auto look_up = [&](int from) {
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t i = begin + from + j;
      const bool there = from + j < count;
      next_row[j] = there ? in.bags.rows[i] : -1;
      next_weight[j] = there ? Acc<T>{1} : Acc<T>{0};
      if (there && in.sample_weights != nullptr) next_weight[j] = in.sample_weights[i];
    }
  };
  for (int l = 0; l < kWidth; ++l) sum[l] = 0;
  total = 0;
  look_up(0);
  for (int k = 0; k < count; k += kInFlight) {
    int64_t row[kInFlight];
    Acc<T> weight[kInFlight];
    RowPiece<T, kWidth> piece[kInFlight];
    for (int j = 0; j < kInFlight; ++j) {
      row[j] = next_row[j];
      weight[j] = next_weight[j];
    }
    for (int j = 0; j < kInFlight; ++j) {
      piece[j] = {};
      if (row[j] >= 0 && row[j] < in.num_rows && element < in.dim) {
        piece[j].read(in.weight + row[j] * in.dim + element);
      }
    }
    look_up(k + kInFlight);
    for (int j = 0; j < kInFlight; ++j) {
      total += in_total(weight[j], in.combiner);
      if (row[j] >= in.num_rows) {
        if (element == 0) simt::atomic_min(in.errors.bad_row, begin + k + j);
      } else if (row[j] >= 0) {
        for (int l = 0; l < kWidth; ++l) sum[l] += weight[j] * load(piece[j].at(l));
      }
    }
  }
}

// Writes the pooled vector of a bag of `count` entries.
template <class T, int kWidth>
SPARSEKIT_DEVICE void write_bag(const Pooling<T>& in, int64_t bag, int64_t count, int64_t element,
                                Acc<T> (&sum)[kWidth], Acc<T> total, T* out) {
  if (element >= in.dim) return;
  const Acc<T> by = divisor(total, count, in.combiner);
  for (int j = 0; j < kWidth; ++j) sum[j] = divided(sum[j], by);
  write_row(out + bag * in.dim + element, sum);
}

// A part of a long bag: entries [begin + index * kPart, ...) of it, at most kPart.
struct Part {
  int64_t bag;  // negative in a slot without a part
  int64_t index;
};

SPARSEKIT_DEVICE int64_t num_parts(const Range& range) {
  return (range.end - range.begin + kPart - 1) / kPart;
}

// Parts of all long bags, those of one bag side by side; the order of the bags is that of
// arrival, which no sum depends on.
template <class T>
struct LongBags {
  int64_t* taken;    // parts so far
  Part* parts;       // [capacity]
  Acc<T>* sums;      // [capacity, dim]
  Acc<T>* totals;    // [2, capacity]
  int64_t capacity;  // 0 when no bag can be long

  LongBags(Arena& arena, int64_t n, int64_t dim)
      // A bag of more than kPart entries has fewer than two parts for each kPart of them.
      : capacity(n <= kPart ? 0 : 2 * (n / kPart) + 1) {
    taken = arena.take<int64_t>(capacity == 0 ? 0 : 1);
    parts = arena.take<Part>(capacity);
    sums = arena.take<Acc<T>>(capacity * dim);
    totals = arena.take<Acc<T>>(2 * capacity);
  }
};

// A tile per bag, and one more for the last offset. Long bags are put down as parts and get zeros
// for now; they keep them if there is no space, which only bags that overlap can bring about.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    pool_bags_kernel(Pooling<T> in, LongBags<T> long_bags, T* out) {
  const int64_t bag = tile_of_thread(in.log2_lanes);
  const int64_t element = first_element(kWidth, in.log2_lanes);
  if (element == 0 && bag <= in.bags.num_bags) check_offset(in.bags, bag, in.errors.bad_offset);
  Range range = bag < in.bags.num_bags ? bag_range(in.bags, bag) : Range{0, 0};
  if (long_bags.capacity > 0 && simt::column() == 0) {
    const int lanes = 1 << in.log2_lanes;
    const int lane_in_tile = simt::lane() & (lanes - 1);
    const int64_t parts = range.end - range.begin > kPart ? num_parts(range) : 0;
    int64_t first = 0;
    if (parts > 0 && lane_in_tile == 0) first = simt::atomic_add(long_bags.taken, parts);
    first = simt::warp_shuffle(first, simt::lane() - lane_in_tile);
    for (int64_t j = lane_in_tile; j < parts && first + parts <= long_bags.capacity; j += lanes) {
      long_bags.parts[first + j] = Part{bag, j};
    }
  }
  if (bag >= in.bags.num_bags) return;
  const int64_t entries = range.end - range.begin;
  const int count = entries > kPart ? 0 : static_cast<int>(entries);
  Acc<T> sum[kWidth], total;
  pool(in, range.begin, count, element, sum, total);
  write_bag(in, bag, count, element, sum, total, out);
}

// A tile per part.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256) pool_parts_kernel(Pooling<T> in, LongBags<T> long_bags) {
  const int64_t slot = tile_of_thread(in.log2_lanes);
  const int64_t element = first_element(kWidth, in.log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  const Part part = long_bags.parts[slot];
  const Range range = bag_range(in.bags, part.bag);
  const int64_t begin = range.begin + part.index * kPart;
  const auto count = static_cast<int>(range.end - begin < kPart ? range.end - begin : kPart);
  Acc<T> sum[kWidth], total;
  pool(in, begin, count, element, sum, total);
  if (element < in.dim) write_row(long_bags.sums + slot * in.dim + element, sum);
  if (element == 0) long_bags.totals[slot] = total;
}

// Every stride-th part of a bag has the sum of its `stride` parts; now adds kPart of those to the
// first of them, and writes the bags when no more is to be added. Totals go from one half of
// `totals` to the other, as every lane of a row reads them; sums stay in their place.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    add_parts_kernel(Pooling<T> in, LongBags<T> long_bags, int64_t stride, int half, bool last,
                     T* out) {
  const int64_t slot = tile_of_thread(in.log2_lanes);
  const int64_t element = first_element(kWidth, in.log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  const Part part = long_bags.parts[slot];
  if (part.index % (stride * kPart) != 0) return;
  const Range range = bag_range(in.bags, part.bag);
  const int64_t left = (num_parts(range) - part.index + stride - 1) / stride;
  const int64_t count = left < kPart ? left : kPart;
  const Acc<T>* totals = long_bags.totals + half * long_bags.capacity;

  Acc<T> sum[kWidth] = {}, total = 0;
  for (int64_t k = 0; k < count; k += kInFlight) {
    RowPiece<Acc<T>, kWidth> piece[kInFlight];
    Acc<T> more[kInFlight];
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t from = slot + (k + j) * stride;
      piece[j] = {};
      if (k + j < count && element < in.dim) {
        piece[j].read(long_bags.sums + from * in.dim + element);
      }
      more[j] = k + j < count ? totals[from] : Acc<T>{0};
    }
    for (int j = 0; j < kInFlight; ++j) {
      total += more[j];
      for (int l = 0; l < kWidth; ++l) sum[l] += piece[j].at(l);
    }
  }
  if (last) return write_bag(in, part.bag, range.end - range.begin, element, sum, total, out);
  if (element < in.dim) write_row(long_bags.sums + slot * in.dim + element, sum);
  if (element == 0) long_bags.totals[(1 - half) * long_bags.capacity + slot] = total;
}

template <class T, int kWidth>
void pool_bags(const Pooling<T>& in, const LongBags<T>& long_bags, const RowShape& shape, T* out,
               void* stream) {
  if (long_bags.capacity > 0) {
    simt::fill_bytes(long_bags.taken, 0, sizeof *long_bags.taken, stream);
    simt::fill_bytes(long_bags.parts, 0xFF, long_bags.capacity * static_cast<int64_t>(sizeof(Part)),
                     stream);
  }
  simt::launch("embedding_bag: bags", pool_bags_kernel<T, kWidth>,
               grid_for_rows(in.bags.num_bags + 1, shape), stream, in, long_bags, out);
  if (long_bags.capacity == 0) return;
  const simt::Grid grid = grid_for_rows(long_bags.capacity, shape);
  simt::launch("embedding_bag: parts", pool_parts_kernel<T, kWidth>, grid, stream, in, long_bags);
  int half = 0;
  bool last = false;
  for (int64_t stride = 1; !last; stride *= kPart, half = 1 - half) {
    last = stride * kPart * kPart >= in.bags.n;
    simt::launch("embedding_bag: sums of parts", add_parts_kernel<T, kWidth>, grid, stream, in,
                 long_bags, stride, half, last, out);
  }
}

// ---- backward ----

// Sums over the entries of a bag, by all lanes of a warp, which hold the same bag: the total of
// the weights and, with `dots`, the weighted sum of those.
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
    if (dots != nullptr) sums.weighted += weights[i] * dots[i];
  }
  for (int step = simt::kWarp / 2; step > 0; step /= 2) {
    sums.total += simt::warp_shuffle(sums.total, simt::lane() ^ step);
    sums.weighted += simt::warp_shuffle(sums.weighted, simt::lane() ^ step);
  }
  return sums;
}

// divisors[bag] of weighted bags, a warp for each.
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

// What each entry is to the segment sum over rows: the gradient of its bag, scaled.
template <class A>
struct BagEntries {
  int32_t* bag;          // [n], -1 for an entry of no bag; null when there are sample weights
  ScaledRow<A>* scaled;  // [n] with sample weights; else [num_bags], or null when nothing is scaled
  A* divisors;           // [num_bags], null unless weights are divided
};

// A thread for each entry, bag and offset.
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

// ---- backward of the sample weights ----

// grad[i] = gradient of entry i's bag times its row, kInFlight entries per tile.
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
  // What to multiply; null for zeros.
  const T *g[kInFlight], *x[kInFlight];
  int64_t bag = -1;
  for (int j = 0; j < kInFlight; ++j) {
    const int64_t i = first + j;
    g[j] = x[j] = nullptr;
    if (i >= in.bags.n) continue;
    // Mostly the bag of the entry before.
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

// From the dots to the gradient, as the CPU's comment says; a warp per bag.
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
    grad[i] = divided(grad[i] - shared, by);
  }
}

}  // namespace

template <class T>
int64_t embedding_bag_workspace_bytes(const Bags& bags, int64_t dim) {
  Arena arena;
  LongBags<T>(arena, bags.n, dim);
  return arena.bytes();
}

template <class T>
void embedding_bag(const T* weight, int64_t num_rows, int64_t dim, const Bags& bags,
                   const Acc<T>* sample_weights, Combiner combiner, T* out, const BagErrors& errors,
                   void* workspace, void* stream) {
  Arena arena(workspace);
  const LongBags<T> long_bags(arena, bags.n, dim);
  const RowShape shape = row_shape<T>(dim, weight, out);
  const Pooling<T> in{weight,         num_rows, dim,    bags,
                      sample_weights, combiner, errors, shape.log2_lanes};
  const auto run = shape.width == 1 ? pool_bags<T, 1> : pool_bags<T, kWide<T>>;
  run(in, long_bags, shape, out, stream);
}

template <class T>
int64_t embedding_bag_backward_workspace_bytes(const Bags& bags, int64_t dim, int64_t num_rows) {
  Arena arena;
  BackwardWorkspace<T>(arena, bags, dim, num_rows);
  return arena.bytes();
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
  reduce_segments<T>(segments, {grad_out, entries.scaled, dim}, deterministic, grad_weight,
                     work.segments, stream);
}

template <class T>
void embedding_bag_backward_sample_weights(const T* grad_out, const T* weight, int64_t num_rows,
                                           int64_t dim, const Bags& bags,
                                           const Acc<T>* sample_weights, Combiner combiner,
                                           Acc<T>* grad_sample_weights, const BagErrors& errors,
                                           void* stream) {
  const RowShape shape = row_shape<T>(dim, weight, grad_out);
  const Pooling<T> in{weight,         num_rows, dim,    bags,
                      sample_weights, combiner, errors, shape.log2_lanes};
  const int64_t tiles = (bags.n + kInFlight - 1) / kInFlight;
  const simt::Grid grid = simt::grid_for(std::max(tiles << shape.log2_lanes, bags.num_bags + 1));
  const auto dots = shape.width == 1 ? entry_dots_kernel<T, 1> : entry_dots_kernel<T, kWide<T>>;
  simt::launch("embedding_bag: dots", dots, grid, stream, grad_out, in, grad_sample_weights);
  if (combiner == Combiner::kSum) return;
  simt::launch("embedding_bag: normalise", normalise_dots_kernel<Acc<T>>,
               simt::grid_for(bags.num_bags * simt::kWarp), stream, bags, sample_weights, combiner,
               grad_sample_weights);
}

#define SPARSEKIT_INSTANTIATE(T)                                                                \
  template int64_t embedding_bag_workspace_bytes<T>(const Bags&, int64_t);                      \
  template void embedding_bag(const T*, int64_t, int64_t, const Bags&, const Acc<T>*, Combiner, \
                              T*, const BagErrors&, void*, void*);                              \
  template int64_t embedding_bag_backward_workspace_bytes<T>(const Bags&, int64_t, int64_t);    \
  template void embedding_bag_backward(const T*, int64_t, int64_t, const Bags&, const Acc<T>*,  \
                                       Combiner, bool, T*, const BagErrors&, void*, void*);     \
  template void embedding_bag_backward_sample_weights(const T*, const T*, int64_t, int64_t,     \
                                                      const Bags&, const Acc<T>*, Combiner,     \
                                                      Acc<T>*, const BagErrors&, void*);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
