// Forward pass of embedding_bag. Each tile of lanes pools one bag; many tiles share a long bag.
#pragma once

#include <cstdint>

#include "cuda/bags.cuh"
#include "cuda/row_shape.h"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/embedding_bag.h"

namespace sparsekit::cuda {

// Maximum number of a bag's entries that one tile pools. A longer bag is split into parts of this
// size. Each part is pooled by its own tile, and the sums of the parts are then added in order,
// kPart at a time.
constexpr int64_t kPart = 256;

// The bags of one call of embedding_bag. The code below accesses bags and entries only through
// these members, so any type that has the same members can be used instead.
template <class T>
struct Pooling {
  using Element = T;
  static constexpr bool kCopies = false;  // true if the combiner may be kNone

  const T* weight;
  int64_t num_rows;
  int64_t dim;
  Bags bags;
  const Acc<T>* sample_weights;  // may be null
  Combiner combiner;
  BagErrors errors;
  int log2_lanes;
  T* out;

  SPARSEKIT_DEVICE int64_t num_bags() const { return bags.num_bags; }
  SPARSEKIT_DEVICE int64_t num_entries() const { return bags.n; }
  SPARSEKIT_DEVICE int64_t offset(int64_t bag) const { return bags.offsets[bag]; }
  SPARSEKIT_DEVICE Range range(int64_t bag) const { return bag_range(bags, bag); }
  SPARSEKIT_DEVICE T* vector(int64_t bag) const { return out + bag * dim; }
  // Returns the index of a bag among all bags of a launch.
  SPARSEKIT_DEVICE int64_t number(int64_t bag) const { return bag; }

  SPARSEKIT_DEVICE void check(int64_t position) const {
    if (position <= bags.num_bags) check_offset(bags, position, errors.bad_offset);
  }
  // Returns the row of entry i, or -1 if the entry contributes zeros.
  SPARSEKIT_DEVICE int64_t row(int64_t i, bool report) const {
    const int64_t row = bags.rows[i];
    if (row < num_rows) return row < 0 ? -1 : row;
    if (report) simt::atomic_min(errors.bad_row, i);
    return -1;
  }
  SPARSEKIT_DEVICE Acc<T> weight_of(int64_t i) const {
    return sample_weights == nullptr ? Acc<T>{1} : sample_weights[i];
  }
  template <int kWidth>
  SPARSEKIT_DEVICE void read(int64_t, int64_t row, int64_t element,
                             RowPiece<T, kWidth>& piece) const {
    piece.read(weight + row * dim + element);
  }
};

// Row indices and weights of the next kInFlight entries. They are loaded before the rows
// themselves.
template <class T>
struct Entries {
  int64_t row[kInFlight];  // -1 for an entry without a row
  Acc<T> weight[kInFlight];

  // Loads the row indices and weights of kInFlight entries, starting at begin + from. Entries at or
  // after begin + count get row -1 and weight 0.
  template <class In>
  SPARSEKIT_DEVICE void look_up(const In& in, int64_t begin, int from, int count, bool report) {
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t i = begin + from + j;
      const bool there = from + j < count;
      row[j] = there ? in.row(i, report) : -1;
      weight[j] = there ? in.weight_of(i) : Acc<T>{0};
    }
  }
  template <int kWidth, class In>
  SPARSEKIT_DEVICE void read(const In& in, int64_t begin, int64_t element,
                             RowPiece<T, kWidth> (&piece)[kInFlight]) const {
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      piece[j] = {};
      if (row[j] != -1 && element < in.dim) in.read(begin + j, row[j], element, piece[j]);
    }
  }
  // Adds entry j's row and weight.
  template <bool kShortBags, int kWidth, class In>
  SPARSEKIT_DEVICE void add(const In& in, int j, const RowPiece<T, kWidth>& piece,
                            Acc<T> (&sum)[kWidth], Acc<T>& total) const {
    // The conditions on `in` are the same for all lanes, and save instructions if bags have few
    // entries. For longer bags, their cost in registers matters more.
    if (!kShortBags || has_divisor(in.combiner)) total += in_total(weight[j], in.combiner);
    if (row[j] == -1) return;
    for (int l = 0; l < kWidth; ++l) {
      const Acc<T> value = load(piece.at(l));
      // Copy without adding: 0 + value would lose the sign of a negative zero.
      const bool copies = In::kCopies && in.combiner == Combiner::kNone;
      const bool weighted = !kShortBags || in.sample_weights != nullptr;
      sum[l] = copies ? value : sum[l] + (weighted ? weight[j] * value : value);
    }
  }
};

// Adds `count` entries, starting at `begin`, in order. Adds their weighted rows to `sum` and their
// weights to `total`. Calls before(k) before adding the k-th row.
template <bool kShortBags, int kWidth, class In, class T, class Before>
SPARSEKIT_DEVICE void add_entries(const In& in, int64_t begin, int count, int64_t element,
                                  T (&sum)[kWidth], T& total, const Before& before) {
  using Element = typename In::Element;
  Entries<Element> next;
  next.look_up(in, begin, 0, count, element == 0);
  for (int k = 0; k < count; k += kInFlight) {
    const Entries<Element> now = next;
    RowPiece<Element, kWidth> piece[kInFlight];
    now.read(in, begin + k, element, piece);
    if (!kShortBags || k + kInFlight < count) {
      next.look_up(in, begin, k + kInFlight, count, element == 0);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      before(k + j);
      now.template add<kShortBags>(in, j, piece[j], sum, total);
    }
  }
}

// Computes the sum and the total weight of `count` <= kPart entries, starting at `begin`.
template <int kWidth, class In, class T>
SPARSEKIT_DEVICE void pool(const In& in, int64_t begin, int count, int64_t element,
                           T (&sum)[kWidth], T& total) {
  for (int l = 0; l < kWidth; ++l) sum[l] = 0;
  total = 0;
  add_entries<false>(in, begin, count, element, sum, total, [](int) {});
}

// Writes the pooled vector for a bag of `count` entries.
template <bool kShortBags, int kWidth, class In, class T>
SPARSEKIT_DEVICE void write_bag(const In& in, int64_t bag, int64_t count, int64_t element,
                                T (&sum)[kWidth], T total) {
  if (element >= in.dim) return;
  const T by = divisor(total, count, in.combiner);
  if (!kShortBags || by != T{1}) {
    for (int j = 0; j < kWidth; ++j) sum[j] = divided(sum[j], by);
  }
  write_row(in.vector(bag) + element, sum);
}

// Pools a bag. If the bag is long, only sets its output to zeros.
template <int kWidth, class In>
SPARSEKIT_DEVICE void pool_bag(const In& in, int64_t bag, const Range& range, int64_t element) {
  const int64_t entries = range.end - range.begin;
  const int count = entries > kPart ? 0 : static_cast<int>(entries);
  Acc<typename In::Element> sum[kWidth], total;
  pool(in, range.begin, count, element, sum, total);
  write_bag<false>(in, bag, count, element, sum, total);
}

// A part of a long bag: up to kPart entries, starting at begin + index * kPart.
struct Part {
  int64_t bag;  // negative if the slot has no part
  int64_t index;
};

SPARSEKIT_DEVICE int64_t num_parts(const Range& range) {
  return (range.end - range.begin + kPart - 1) / kPart;
}

// Parts of all long bags. The parts of a bag are contiguous. The order of the bags depends on
// timing, but the sums do not.
template <class T>
struct LongBags {
  int64_t* taken;    // number of parts so far
  Part* parts;       // [capacity]
  Acc<T>* sums;      // [capacity, dim]
  Acc<T>* totals;    // [2, capacity]
  int64_t capacity;  // 0 if no bag can be long
  int64_t dim;

  LongBags(Arena& arena, int64_t n, int64_t dim)
      // A bag of more than kPart entries has fewer than two parts per kPart entries.
      : capacity(n <= kPart ? 0 : 2 * (n / kPart) + 1), dim(dim) {
    taken = arena.take<int64_t>(capacity == 0 ? 0 : 1);
    parts = arena.take<Part>(capacity);
    sums = arena.take<Acc<T>>(capacity * dim);
    totals = arena.take<Acc<T>>(2 * capacity);
  }
};

// Appends the parts of a long bag to the list. All lanes of a warp must call this; the lanes of a
// tile pass the same bag.
template <class In, class T>
SPARSEKIT_DEVICE void put_down_parts(const In& in, const LongBags<T>& long_bags, int64_t bag,
                                     const Range& range) {
  const int lanes = 1 << in.log2_lanes;
  const int lane_in_tile = simt::lane() & (lanes - 1);
  const int64_t parts = range.end - range.begin > kPart ? num_parts(range) : 0;
  int64_t first = 0;
  if (parts > 0 && lane_in_tile == 0) first = simt::atomic_add(long_bags.taken, parts);
  first = simt::warp_shuffle(first, simt::lane() - lane_in_tile);
  for (int64_t j = lane_in_tile; j < parts && first + parts <= long_bags.capacity; j += lanes) {
    long_bags.parts[first + j] = Part{in.number(bag), j};
  }
}

// Pools one bag per tile; one more tile checks the last offset. All lanes of the warp must call
// this function. If `long_too` is true, appends the parts of long bags to the list and sets their
// outputs to zeros. The outputs stay zero if the list has no space for the parts, which happens
// only if bags overlap.
template <int kWidth, class In, class T>
SPARSEKIT_DEVICE void pool_own_bag(const In& in, const LongBags<T>& long_bags, bool long_too,
                                   int64_t bag, int64_t element) {
  if (element == 0) in.check(bag);
  const Range range = bag < in.num_bags() ? in.range(bag) : Range{0, 0};
  if (long_too) put_down_parts(in, long_bags, bag, range);
  if (bag < in.num_bags()) pool_bag<kWidth>(in, bag, range, element);
}

// Number of bags per tile if bags are short. With a single bag of one or two entries, a tile would
// wait three times in a row (for offsets, row indices and rows), each time with few loads in
// flight.
constexpr int kBags = kInFlight;
// Bags are short if they have fewer entries than this on average. Longer bags have at least two
// batches of rows, so the waits before the first batch hardly matter. This is an estimate, not yet
// measured.
constexpr int64_t kShort = 2 * kInFlight;

// Writes the vectors of kBags bags with one entry each, starting at bag `first` and entry `begin`.
template <int kWidth, class In>
SPARSEKIT_DEVICE void copy_entries(const In& in, int64_t begin, int64_t first, int64_t element) {
  using Element = typename In::Element;
  Entries<Element> entries;
  entries.look_up(in, begin, 0, kBags, element == 0);
  RowPiece<Element, kWidth> piece[kBags];
  entries.read(in, begin, element, piece);
#pragma unroll
  for (int j = 0; j < kBags; ++j) {
    Acc<Element> sum[kWidth] = {}, total = 0;
    entries.template add<true>(in, j, piece[j], sum, total);
    write_bag<true>(in, first + j, 1, element, sum, total);
  }
}

// Like pool_own_bag, but with kBags bags per tile, starting at bag `first`. The entries of these
// bags are contiguous, so they are processed like the entries of one bag.
template <int kWidth, class In, class T>
SPARSEKIT_DEVICE void pool_own_short_bags(const In& in, const LongBags<T>& long_bags, bool long_too,
                                          int64_t first, int64_t element) {
  const int64_t last = first + kBags < in.num_bags() ? first + kBags : in.num_bags();
  int64_t before = first < last ? in.offset(first) : 0;
  // Becomes false if the entries are not contiguous or if a bag has more than kPart entries.
  bool plain = before >= 0;
  bool one_each = first + kBags <= last;  // true if each of kBags bags has one entry
  for (int j = 0; j < kBags; ++j) {
    const int64_t bag = first + j;
    if (element == 0) in.check(bag);
    if (bag >= last) continue;
    const int64_t after = in.offset(bag + 1);
    plain = plain && before <= after && after - before <= kPart;
    one_each = one_each && after - before == 1;
    before = after;
  }
  plain = plain && before <= in.num_entries();
  if (long_too && simt::warp_any(!plain)) {
    for (int64_t bag = first; bag < first + kBags; ++bag) {
      const Range range = bag < in.num_bags() ? in.range(bag) : Range{0, 0};
      put_down_parts(in, long_bags, bag, range);
    }
  }
  if (!plain) {
    for (int64_t bag = first; bag < last; ++bag) {
      pool_bag<kWidth>(in, bag, in.range(bag), element);
    }
    return;
  }
  if (first >= last) return;

  const int64_t begin = in.offset(first);
  if (one_each) return copy_entries<kWidth>(in, begin, first, element);
  const auto count = static_cast<int>(before - begin);
  int64_t bag = first;
  int begin_of_bag = 0, end_of_bag = static_cast<int>(in.offset(first + 1) - begin);
  Acc<typename In::Element> sum[kWidth] = {}, total = 0;
  const auto finish_bag = [&] {
    write_bag<true>(in, bag, end_of_bag - begin_of_bag, element, sum, total);
    for (int l = 0; l < kWidth; ++l) sum[l] = 0;
    total = 0;
    ++bag;
    begin_of_bag = end_of_bag;
    if (bag < last) end_of_bag = static_cast<int>(in.offset(bag + 1) - begin);
  };
  add_entries<true>(in, begin, count, element, sum, total, [&](int k) {
    while (k == end_of_bag && bag + 1 < last) finish_bag();
  });
  while (bag < last) finish_bag();
}

// Computes the sum over the part in slot `slot`, which belongs to bag `bag`.
template <int kWidth, class In, class T>
SPARSEKIT_DEVICE void pool_part(const In& in, const LongBags<T>& long_bags, int64_t slot,
                                int64_t bag, int64_t element) {
  const Range range = in.range(bag);
  const int64_t begin = range.begin + long_bags.parts[slot].index * kPart;
  const auto count = static_cast<int>(range.end - begin < kPart ? range.end - begin : kPart);
  Acc<T> sum[kWidth], total;
  pool(in, begin, count, element, sum, total);
  if (element < in.dim) write_row(long_bags.sums + slot * long_bags.dim + element, sum);
  if (element == 0) long_bags.totals[slot] = total;
}

// A round of adding parts. Before the round, every stride-th part of a bag holds the sum of
// `stride` parts. The round adds these sums in groups of kPart and stores the result in the first
// part of each group. In the last round, a single group is left, and its sum is written as the
// bag's vector. Sums are updated in place, since only one lane reads and writes each element.
// Totals are read by all lanes of a row, so the round reads them from one half of `totals` and
// writes them to the other.
struct Round {
  int64_t stride;
  int half;
  bool last;
};

// Performs a round's additions for the part in slot `slot`, which belongs to bag `bag`.
template <int kWidth, class In, class T>
SPARSEKIT_DEVICE void add_to_part(const In& in, const LongBags<T>& long_bags, Round round,
                                  int64_t slot, int64_t bag, int64_t element) {
  const int64_t index = long_bags.parts[slot].index;
  if (index % (round.stride * kPart) != 0) return;
  const Range range = in.range(bag);
  const int64_t left = (num_parts(range) - index + round.stride - 1) / round.stride;
  const int64_t count = left < kPart ? left : kPart;
  const Acc<T>* totals = long_bags.totals + round.half * long_bags.capacity;

  Acc<T> sum[kWidth] = {}, total = 0;
  for (int64_t k = 0; k < count; k += kInFlight) {
    RowPiece<Acc<T>, kWidth> piece[kInFlight];
    Acc<T> more[kInFlight];
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t from = slot + (k + j) * round.stride;
      piece[j] = {};
      if (k + j < count && element < in.dim) {
        piece[j].read(long_bags.sums + from * long_bags.dim + element);
      }
      more[j] = k + j < count ? totals[from] : Acc<T>{0};
    }
    for (int j = 0; j < kInFlight; ++j) {
      total += more[j];
      for (int l = 0; l < kWidth; ++l) sum[l] += piece[j].at(l);
    }
  }
  if (round.last) {
    return write_bag<false>(in, bag, range.end - range.begin, element, sum, total);
  }
  if (element < in.dim) write_row(long_bags.sums + slot * long_bags.dim + element, sum);
  if (element == 0) long_bags.totals[(1 - round.half) * long_bags.capacity + slot] = total;
}

template <class T>
void clear_parts(const LongBags<T>& long_bags, void* stream) {
  if (long_bags.capacity == 0) return;
  simt::fill_bytes(long_bags.taken, 0, sizeof *long_bags.taken, stream);
  simt::fill_bytes(long_bags.parts, 0xFF, long_bags.capacity * static_cast<int64_t>(sizeof(Part)),
                   stream);
}

// Calls run(round) for each round needed for bags of up to n entries.
template <class Run>
void for_each_round(int64_t n, const Run& run) {
  Round round{1, 0, false};
  for (; !round.last; round.stride *= kPart, round.half = 1 - round.half) {
    round.last = round.stride * kPart * kPart >= n;
    run(round);
  }
}

}  // namespace sparsekit::cuda
