// The forward of embedding_bag: a tile of lanes pools a bag, and a long bag is shared by many.
#pragma once

#include <cstdint>

#include "cuda/bags.cuh"
#include "cuda/row_piece.cuh"
#include "cuda/row_shape.h"
#include "cuda/simt.cuh"
#include "cuda/workspace.h"
#include "sparsekit/embedding_bag.h"

namespace sparsekit::cuda {

// Entries of a bag that one tile pools. A longer bag is cut into parts of this many, which are
// pooled by tiles of their own and then put together in order, kPart at a time.
constexpr int64_t kPart = 256;

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

// The next kInFlight entries: what is known of them before their rows arrive.
template <class T>
struct Entries {
  int64_t row[kInFlight];  // -1 where there is none
  Acc<T> weight[kInFlight];

  // Of the `count` entries from `begin`, those after the first `from`.
  SPARSEKIT_DEVICE void look_up(const Pooling<T>& in, int64_t begin, int from, int count) {
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t i = begin + from + j;
      const bool there = from + j < count;
      row[j] = there ? in.bags.rows[i] : -1;
      weight[j] = there ? Acc<T>{1} : Acc<T>{0};
      if (there && in.sample_weights != nullptr) weight[j] = in.sample_weights[i];
    }
  }
  template <int kWidth>
  SPARSEKIT_DEVICE void read(const Pooling<T>& in, int64_t element,
                             RowPiece<T, kWidth> (&piece)[kInFlight]) const {
    for (int j = 0; j < kInFlight; ++j) {
      piece[j] = {};
      if (row[j] >= 0 && row[j] < in.num_rows && element < in.dim) {
        piece[j].read(in.weight + row[j] * in.dim + element);
      }
    }
  }
  // Adds entry `i`, which is the j-th of these.
  template <int kWidth>
  SPARSEKIT_DEVICE void add(const Pooling<T>& in, int j, int64_t i, int64_t element,
                            const RowPiece<T, kWidth>& piece, Acc<T> (&sum)[kWidth],
                            Acc<T>& total) const {
    total += in_total(weight[j], in.combiner);
    if (row[j] >= in.num_rows) {
      if (element == 0) simt::atomic_min(in.errors.bad_row, i);
    } else if (row[j] >= 0) {
      for (int l = 0; l < kWidth; ++l) sum[l] += weight[j] * load(piece.at(l));
    }
  }
};

// Adds the weighted rows of the `count` entries from `begin` to sum, in order, and to total what
// their weights add to the total. Calls before(k) before it adds the k-th.
template <class T, int kWidth, class Before>
SPARSEKIT_DEVICE void add_entries(const Pooling<T>& in, int64_t begin, int count, int64_t element,
                                  Acc<T> (&sum)[kWidth], Acc<T>& total, const Before& before) {
  Entries<T> next;
  next.look_up(in, begin, 0, count);
  for (int k = 0; k < count; k += kInFlight) {
    const Entries<T> now = next;
    RowPiece<T, kWidth> piece[kInFlight];
    now.read(in, element, piece);
    next.look_up(in, begin, k + kInFlight, count);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      before(k + j);
      now.add(in, j, begin + k + j, element, piece[j], sum, total);
    }
  }
}

// sum = the weighted rows of the `count` entries from `begin`, at most kPart; total likewise.
template <class T, int kWidth>
SPARSEKIT_DEVICE void pool(const Pooling<T>& in, int64_t begin, int count, int64_t element,
                           Acc<T> (&sum)[kWidth], Acc<T>& total) {
  for (int l = 0; l < kWidth; ++l) sum[l] = 0;
  total = 0;
  add_entries(in, begin, count, element, sum, total, [](int) {});
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

// Pools a bag; a long one gets zeros for now.
template <class T, int kWidth>
SPARSEKIT_DEVICE void pool_bag(const Pooling<T>& in, int64_t bag, const Range& range,
                               int64_t element, T* out) {
  const int64_t entries = range.end - range.begin;
  const int count = entries > kPart ? 0 : static_cast<int>(entries);
  Acc<T> sum[kWidth], total;
  pool(in, range.begin, count, element, sum, total);
  write_bag(in, bag, count, element, sum, total, out);
}

// A part of a long bag: entries [begin + index * kPart, ...) of it, at most kPart.
struct Part {
  int64_t bag;  // negative in a slot without a part
  int64_t index;
};

SPARSEKIT_DEVICE int64_t num_parts(const Range& range) {
  return (range.end - range.begin + kPart - 1) / kPart;
}

// Parts of all long bags, those of one bag side by side. The bags lie in order of arrival, which no
// sum depends on.
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

// Puts a long bag down as parts. All lanes of a warp call it, those of a tile for the same bag.
template <class T>
SPARSEKIT_DEVICE void put_down_parts(const Pooling<T>& in, const LongBags<T>& long_bags,
                                     int64_t bag, const Range& range) {
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

// A tile per bag, and one more for the last offset. Long bags are put down as parts and get zeros
// for now; they keep them if there is no space, which only bags that overlap can bring about.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    pool_bags_kernel(Pooling<T> in, LongBags<T> long_bags, T* out) {
  const int64_t bag = tile_of_thread(in.log2_lanes);
  const int64_t element = first_element(kWidth, in.log2_lanes);
  if (element == 0 && bag <= in.bags.num_bags) check_offset(in.bags, bag, in.errors.bad_offset);
  const Range range = bag < in.bags.num_bags ? bag_range(in.bags, bag) : Range{0, 0};
  if (long_bags.capacity > 0 && simt::column() == 0) put_down_parts(in, long_bags, bag, range);
  if (bag < in.bags.num_bags) pool_bag<T, kWidth>(in, bag, range, element, out);
}

// Bags of a tile, where bags are short: a bag of an entry or two is three waits in a row, for its
// offsets, its row numbers and its rows, with little under way in each.
constexpr int kBags = 4;
// Bags are short with fewer entries than this on average, two batches of rows: from there on the
// waits before the rows no longer count for much. An estimate, not yet measured.
constexpr int64_t kShort = 2 * kInFlight;

// The same for kBags bags a tile, whose entries, side by side, are walked as those of one bag.
template <class T, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    pool_short_bags_kernel(Pooling<T> in, LongBags<T> long_bags, T* out) {
  const int64_t* offsets = in.bags.offsets;
  const int64_t first = tile_of_thread(in.log2_lanes) * kBags;
  const int64_t last = first + kBags < in.bags.num_bags ? first + kBags : in.bags.num_bags;
  const int64_t element = first_element(kWidth, in.log2_lanes);
  int64_t before = first < last ? offsets[first] : 0;
  // Whether the entries do lie side by side, and are few.
  bool plain = before >= 0;
  for (int j = 0; j < kBags; ++j) {
    const int64_t bag = first + j;
    if (element == 0 && bag <= in.bags.num_bags) check_offset(in.bags, bag, in.errors.bad_offset);
    if (bag >= last) continue;
    const int64_t after = offsets[bag + 1];
    plain = plain && before <= after && after - before <= kPart;
    before = after;
  }
  plain = plain && before <= in.bags.n;
  if (long_bags.capacity > 0 && simt::column() == 0 && simt::warp_any(!plain)) {
    for (int64_t bag = first; bag < first + kBags; ++bag) {
      const Range range = bag < in.bags.num_bags ? bag_range(in.bags, bag) : Range{0, 0};
      put_down_parts(in, long_bags, bag, range);
    }
  }
  if (!plain) {
    for (int64_t bag = first; bag < last; ++bag) {
      pool_bag<T, kWidth>(in, bag, bag_range(in.bags, bag), element, out);
    }
    return;
  }
  if (first >= last) return;

  const int64_t begin = offsets[first];
  const auto count = static_cast<int>(before - begin);
  int64_t bag = first;
  int begin_of_bag = 0, end_of_bag = static_cast<int>(offsets[first + 1] - begin);
  Acc<T> sum[kWidth] = {}, total = 0;
  const auto finish_bag = [&] {
    write_bag(in, bag, end_of_bag - begin_of_bag, element, sum, total, out);
    for (int l = 0; l < kWidth; ++l) sum[l] = 0;
    total = 0;
    ++bag;
    begin_of_bag = end_of_bag;
    if (bag < last) end_of_bag = static_cast<int>(offsets[bag + 1] - begin);
  };
  add_entries(in, begin, count, element, sum, total, [&](int k) {
    while (k == end_of_bag && bag + 1 < last) finish_bag();
  });
  while (bag < last) finish_bag();
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

// Every stride-th part of a bag holds the sum of `stride` parts; now every kPart-th of those takes
// the sum of kPart of them, and the last such launch, when only the first part of a bag is left to
// do so, writes the bag. Sums stay in their place, where one lane reads and writes an element;
// totals, which all lanes of a row read, go from one half of `totals` to the other.
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
  const int64_t tiles = in.bags.num_bags + 1;
  if (in.bags.n < kShort * in.bags.num_bags) {
    simt::launch("embedding_bag: short bags", pool_short_bags_kernel<T, kWidth>,
                 grid_for_rows((tiles + kBags - 1) / kBags, shape), stream, in, long_bags, out);
  } else {
    simt::launch("embedding_bag: bags", pool_bags_kernel<T, kWidth>, grid_for_rows(tiles, shape),
                 stream, in, long_bags, out);
  }
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

}  // namespace sparsekit::cuda
