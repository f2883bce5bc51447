// Sums of rows by segment; shared by segment_sum and the backward of embedding_bag, which differ
// only in where the rows lie and what they are multiplied by.
//
// Where there are several entries for each segment, positions are cut into two pieces that are
// summed apart and added at the end. In a piece, entries of a segment are added in the order of
// their positions, in runs of kRun; then the sums of the runs are. So the order of additions
// depends on the ids alone, and a long sum in float stays accurate.
//
// Threads share out the pieces, then the columns: each goes through all ids of its piece and adds
// its columns of every row to sums in memory. So the rows are read once and in order, nobody has
// more to do than others however the ids are spread, and nothing is sorted. Threads beyond what
// columns there are share out runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/first_bad.h"
#include "cpu/sum_rows.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

constexpr int64_t kRun = 1024;

// Entries for each segment from which on a second set of sums pays.
constexpr int64_t kEntriesForTwoPieces = 4;

// Elements that are worth a thread.
constexpr int64_t kLeastWork = 32768;

// Bytes of a row that are worth a thread: half a cache line.
constexpr int64_t kLeastWidth = 32;

// A piece's part of the workspace. k counts its entries in the order of segments.
template <class T>
struct Piece {
  int64_t begin, end;  // positions
  int64_t* start;      // [num_segments + 1] k of the first entry of each segment
  uint64_t* is_long;   // [num_segments / 64] bits: has it more than one run?
  uint64_t* begun;     // [parts, num_segments / 64] bits: is there something in its sum?
  int64_t* seen;    // [parts, chunks] entries met so far of the long segment that starts in a chunk
  Acc<T>* run_sum;  // [2 * chunks, dim] of long segments
  Acc<T>* sum;      // [num_segments, dim] of the others

  // A run belongs to the chunk of kRun entries that it starts in. A chunk can have two runs of long
  // segments: the last of one and the first of another.
  int64_t num_chunks() const { return (end - begin + kRun - 1) / kRun; }

  // Sum of the run that starts at entry k.
  Acc<T>* sum_of_run(int64_t k, bool first_of_segment, int64_t dim) const {
    return run_sum + (2 * (k / kRun) + (first_of_segment ? 1 : 0)) * dim;
  }

  // Fills `start` and `is_long`. Returns -1, or the first position whose id is >= num_segments.
  int64_t count(const int64_t* ids, int64_t num_segments) const {
    std::fill(start, start + num_segments + 1, int64_t{0});
    for (int64_t i = begin; i < end; ++i) {
      if (ids[i] >= num_segments) return i;
      if (ids[i] >= 0) ++start[ids[i] + 1];
    }
    std::fill(is_long, is_long + num_segments / 64 + 1, uint64_t{0});
    for (int64_t s = 0; s < num_segments; ++s) {
      is_long[s / 64] |= uint64_t{start[s + 1] > kRun} << s % 64;
      start[s + 1] += start[s];
    }
    return -1;
  }

  // Sum of a segment, or nullptr if it has no entries. To be called once.
  const Acc<T>* total(int64_t s, int64_t dim) const {
    if (start[s] == start[s + 1]) return nullptr;
    if ((is_long[s / 64] >> s % 64 & 1) == 0) return sum + s * dim;
    Acc<T>* total = sum_of_run(start[s], true, dim);
    for (int64_t k = start[s] + kRun; k < start[s + 1]; k += kRun) {
      const Acc<T>* run = sum_of_run(k, false, dim);
      for (int64_t j = 0; j < dim; ++j) total[j] += run[j];
    }
    return total;
  }
};

// Lays the workspace out in one block of memory.
template <class T>
struct SegmentWorkspace {
  int64_t num_pieces, column_parts, run_parts;
  Acc<T>* zeros;  // [dim]
  Piece<T> pieces[2];
  int64_t bytes = 0;

  SegmentWorkspace(void* memory, int64_t n, int64_t dim, int64_t num_segments, T* out,
                   const ParallelFor& parallel_for) {
    const int64_t threads = std::clamp<int64_t>(n * std::max<int64_t>(dim, 1) / kLeastWork, 1,
                                                parallel_for.num_threads());
    const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Acc<T>));
    num_pieces = n / kEntriesForTwoPieces >= std::max(num_segments, kRun) ? 2 : 1;
    column_parts =
        std::clamp<int64_t>(row_bytes / kLeastWidth, 1, std::max<int64_t>(threads / num_pieces, 1));
    run_parts = std::max<int64_t>(threads / (num_pieces * column_parts), 1);
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(
          static_cast<char*>(memory) + bytes);
      bytes += count * static_cast<int64_t>(sizeof(*array));
    };
    take(zeros, dim);  // first, where memory is aligned
    bytes = (bytes + 7) / 8 * 8;
    for (int64_t p = 0; p < num_pieces; ++p) {
      Piece<T>& piece = pieces[p];
      piece.begin = n * p / num_pieces;
      piece.end = n * (p + 1) / num_pieces;
      take(piece.start, num_segments + 1);
      take(piece.is_long, num_segments / 64 + 1);
      take(piece.begun, column_parts * run_parts * (num_segments / 64 + 1));
      take(piece.seen, column_parts * run_parts * piece.num_chunks());
    }
    for (int64_t p = 0; p < num_pieces; ++p) {
      take(pieces[p].run_sum, 2 * pieces[p].num_chunks() * dim);
      // The first piece's sums can be where the result shall be, if that is of their type.
      const bool in_place = p == 0 && std::is_same_v<T, Acc<T>>;
      take(pieces[p].sum, in_place ? 0 : num_segments * dim);
      if constexpr (std::is_same_v<T, Acc<T>>) {
        if (in_place) pieces[p].sum = out;
      }
    }
  }
};

// sum = before + scale * row.
template <bool kScaled, class T>
inline void add_row(const T* row, Acc<T> scale, const Acc<T>* before, int64_t width, Acc<T>* sum) {
  int64_t j = 0;
  if constexpr (std::is_same_v<T, Acc<T>>) {
    const auto add = [&](auto vector) {
      using V = decltype(vector);
      constexpr int64_t kStep = sizeof(V) / sizeof(T);
      for (const int64_t end = j + (width - j) / kStep * kStep; j < end; j += kStep) {
        V x = load_vector<V>(row + j);
        if constexpr (kScaled) x = scale * x;
        put_at(sum + j, load_vector<V>(before + j) + x);
      }
    };
    add(Vector<T>{});
    add(Vector<T, 32>{});  // half a cache line is what a thread may have of a row
  }
  for (; j < width; ++j) sum[j] = before[j] + (kScaled ? scale * load(row[j]) : load(row[j]));
}

// What is to be added to which sum.
template <class T>
struct Addition {
  const T* row;
  const Acc<T>* before;  // the sum, or zeros if it has no content, so that none need be cleared
  Acc<T>* sum;
};

// One thread's part of a piece: columns of the runs that start at entries low, ..., high - 1.
// kWidth is the number of columns, or 0 for any.
//
// Block by block the additions are written down, and then made. Whether an entry is its segment's
// first, or one of a long segment, is nothing that a branch could predict; so the first loop has no
// branch, the second does nothing but add, and both ask for what is far ahead.
template <int kWidth, class T, class Entries>
void sum_part(const int64_t* ids, int64_t dim, int64_t num_segments, const Entries& entries,
              const SegmentWorkspace<T>& work, const Piece<T>& piece, int64_t part) {
  using A = Acc<T>;
  const int64_t* start = piece.start;
  const int64_t column_part = part % work.column_parts, run_part = part / work.column_parts;
  const int64_t column = dim * column_part / work.column_parts;
  const int64_t width = kWidth > 0 ? kWidth : dim * (column_part + 1) / work.column_parts - column;
  const int64_t low = start[num_segments] * run_part / work.run_parts;
  const int64_t high = start[num_segments] * (run_part + 1) / work.run_parts;
  const bool shares_runs = work.run_parts > 1;

  const int64_t num_words = num_segments / 64 + 1;
  const uint64_t* is_long = piece.is_long;
  uint64_t* begun = piece.begun + part * num_words;
  std::fill(begun, begun + num_words, uint64_t{0});
  int64_t* seen = piece.seen + part * piece.num_chunks();
  std::fill(seen, seen + piece.num_chunks(), int64_t{0});
  const A* zeros = work.zeros;
  A* sums = piece.sum + column;

  constexpr int64_t kBlock = 1024;
  const int64_t distance = rows_ahead<A>(width);
  Addition<T> additions[kBlock + kRowsAhead];
  A scales[Entries::scaled ? kBlock : 1];
  int64_t run_at[kBlock];  // first entry of the run that an addition belongs to
  struct {
    int64_t position, addition;
  } longs[kBlock];
  const auto ask_for = [&](const Addition<T>& addition) {
    prefetch_row(addition.row, width);
    prefetch_row(addition.sum, width);
  };
  for (int64_t block = piece.begin; block < piece.end; block += kBlock) {
    int64_t count = 0, num_longs = 0;
    const auto write_down = [&](int64_t i, const T* row, A scale) {
      // Entries to leave out are written down too, and then written over.
      const bool counts = ids[i] >= 0;
      const int64_t id = counts ? ids[i] : num_segments;
      const uint64_t bit = uint64_t{1} << id % 64, word = begun[id / 64];
      begun[id / 64] = word | bit;
      A* sum = sums + (counts ? id : 0) * dim;
      additions[count] = {row + column, (word & bit) != 0 ? sum : zeros, sum};
      if constexpr (Entries::scaled) scales[count] = scale;
      longs[num_longs] = {i, count};
      num_longs += (is_long[id / 64] & bit) != 0;
      if (shares_runs) run_at[count] = start[id];
      count += counts;
    };
    entries.visit(block, std::min(piece.end, block + kBlock), write_down);
    for (int64_t l = 0; l < num_longs; ++l) {
      const auto [position, addition] = longs[l];
      const int64_t first = start[ids[position]];
      const int64_t met = seen[first / kRun]++;
      run_at[addition] = first + met / kRun * kRun;
      A* sum = piece.sum_of_run(run_at[addition], met < kRun, dim) + column;
      additions[addition].sum = sum;
      additions[addition].before = met % kRun == 0 ? zeros : sum;
    }
    if (shares_runs) {
      int64_t own = 0;
      for (int64_t k = 0; k < count; ++k) {
        additions[own] = additions[k];
        if constexpr (Entries::scaled) scales[own] = scales[k];
        own += run_at[k] >= low && run_at[k] < high;
      }
      count = own;
    }
    if (count == 0) continue;
    std::fill_n(additions + count, distance, additions[count - 1]);
    for (int64_t k = 0; k < distance; ++k) ask_for(additions[k]);
    for (int64_t k = 0; k < count; ++k) {
      ask_for(additions[k + distance]);
      const auto& [row, before, sum] = additions[k];
      add_row<Entries::scaled>(row, scales[Entries::scaled ? k : 0], before, width, sum);
    }
  }
}

// Calls sum with the width as a constant, if it is one of these, else with 0.
template <int... kWidths, class Sum>
void with_width(int64_t width, const Sum& sum) {
  const auto is = [&](auto known) {
    if (width == known.value) sum(known);
    return width == known.value;
  };
  if (!(is(std::integral_constant<int, kWidths>{}) || ...)) sum(std::integral_constant<int, 0>{});
}

// out[s] = sum over the entries i with ids[i] = s of scale * row[0 : dim]; zeros if there are none.
// Entries has `scaled`, whether there is a scale other than 1, and `visit(begin, end, f)`, which
// calls f(i, row, scale) for the positions of a range. Returns -1, or the first position whose id
// is >= num_segments.
template <class T, class Entries>
int64_t reduce_segments(const int64_t* ids, int64_t n, int64_t dim, int64_t num_segments,
                        const Entries& entries, void* workspace, T* out,
                        const ParallelFor& parallel_for) {
  const SegmentWorkspace<T> work(workspace, n, dim, num_segments, out, parallel_for);
  FirstBad bad;
  parallel_for(0, work.num_pieces, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const int64_t position = work.pieces[p].count(ids, num_segments);
      if (position >= 0) bad.report(position);
    }
  });
  if (bad.position() >= 0) return bad.position();

  std::fill_n(work.zeros, dim, Acc<T>{});
  const int64_t parts = work.column_parts * work.run_parts;
  parallel_for(0, work.num_pieces * parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const auto sum = [&](auto width) {
        sum_part<width.value>(ids, dim, num_segments, entries, work, work.pieces[p / parts],
                              p % parts);
      };
      with_width<8, 16, 32, 64, 128, 256>(
          dim % work.column_parts == 0 ? dim / work.column_parts : 0, sum);
    }
  });

  parallel_for(0, num_segments, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      T* target = out + s * dim;
      const Acc<T>* sum = work.pieces[0].total(s, dim);
      const Acc<T>* other = work.num_pieces == 2 ? work.pieces[1].total(s, dim) : nullptr;
      if (sum == nullptr) std::swap(sum, other);
      if (sum == nullptr) {
        std::fill(target, target + dim, T{});
      } else if (other != nullptr) {
        for (int64_t j = 0; j < dim; ++j) target[j] = store<T>(sum[j] + other[j]);
      } else if (static_cast<const void*>(sum) != target) {
        for (int64_t j = 0; j < dim; ++j) target[j] = store<T>(sum[j]);
      }
    }
  });
  return -1;
}

}  // namespace sparsekit::cpu
