// Sums rows by segment. segment_sum and the backward pass of embedding_bag share this code; they
// differ only in the location and the scale of rows.
//
// If there are several entries per segment, the positions are split into two halves. The halves are
// summed separately and added at the end. In each half, the entries of a segment are added in order
// of position, in runs of kRun; then the sums of the runs are added. So the order of additions
// depends only on the ids, and a long sum in float stays accurate.
//
// Threads are assigned to the halves first, then to groups of columns. Each thread goes through all
// ids of its half and adds its columns of every row to sums in memory. So rows are read once and in
// order, the work is balanced for any distribution of ids, and nothing is sorted. If there are more
// threads than column groups, the runs are also divided among threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/first_bad.h"
#include "cpu/sum_rows.h"
#include "sparsekit/arena.h"
#include "sparsekit/device_count.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/hash_table.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

constexpr int64_t kRun = 1024;

// Minimum number of entries per segment to make splitting into two halves worthwhile.
constexpr int64_t kEntriesForHalves = 4;

// Progress of a thread in a segment. The high bits hold the distance (in elements) from the first
// sum to the sum of the current run; the low bits hold the number of entries added to that run so
// far.
using Progress = int64_t;
constexpr int kMetBits = 11;
constexpr Progress kMet = (Progress{1} << kMetBits) - 1;
static_assert(kRun <= kMet);
constexpr Progress run_begins_at(int64_t offset) {
  return offset * (kMet + 1);
}

// Minimum work per thread, in elements.
constexpr int64_t kLeastWork = 32768;

// Minimum number of bytes that a thread handles in each sum: half a cache line.
constexpr int64_t kLeastWidth = 32;

// The workspace of one half.
template <class T>
struct Half {
  int64_t begin, end;  // range of positions
  Progress* progress;  // [parts, num_segments + 1]; the last column is for dropped entries
  int64_t* runs;       // [most_runs] segment of each run that is not the first run of its segment
  int64_t* num_runs;   // [1]
  Acc<T>* run_sum;     // [most_runs, dim] sums of the runs listed in `runs`
  Acc<T>* sum;         // [num_segments, dim] sum of each segment's first run

  int64_t most_runs() const { return (end - begin) / kRun; }

  // For each segment in [low, high), adds the sums of its later runs to the sum of its first run.
  void add_runs(int64_t low, int64_t high, int64_t dim) const {
    for (int64_t r = 0; r < *num_runs; ++r) {
      if (runs[r] < low || runs[r] >= high) continue;
      Acc<T>* total = sum + runs[r] * dim;
      for (int64_t j = 0; j < dim; ++j) total[j] += run_sum[r * dim + j];
    }
  }

  // Returns the sum of a segment, or nullptr if the segment has no entries.
  const Acc<T>* total(int64_t s, int64_t dim) const {
    return progress[s] == run_begins_at(s * dim) ? nullptr : sum + s * dim;
  }
};

// Workspace of a reduction. If sums have the output's type, the first half stores them in the
// output itself.
template <class T>
struct SegmentWorkspace {
  int64_t num_halves = 0, column_parts = 0, run_parts = 0;
  Acc<T>* zeros = nullptr;  // [dim]
  Half<T> halves[2];

  SegmentWorkspace(Arena& arena, int64_t n, int64_t dim, int64_t num_segments, T* out,
                   const ParallelFor& parallel_for) {
    if (n == 0 || dim == 0) return;  // there is nothing to add
    const int64_t threads = std::clamp<int64_t>(n * std::max<int64_t>(dim, 1) / kLeastWork, 1,
                                                parallel_for.num_threads());
    const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Acc<T>));
    num_halves = n / kEntriesForHalves >= std::max(num_segments, kRun) ? 2 : 1;
    column_parts =
        std::clamp<int64_t>(row_bytes / kLeastWidth, 1, std::max<int64_t>(threads / num_halves, 1));
    // Limit run_parts, so that the progress of all parts does not take much more memory than the
    // sums.
    const int64_t most_parts = std::max<int64_t>(row_bytes, 64) / sizeof(Progress);
    run_parts = std::max<int64_t>(std::min(threads / num_halves, most_parts) / column_parts, 1);
    zeros = arena.take<Acc<T>>(dim);
    for (int64_t p = 0; p < num_halves; ++p) {
      Half<T>& half = halves[p];
      half.begin = n * p / num_halves;
      half.end = n * (p + 1) / num_halves;
      half.progress = arena.take<Progress>(column_parts * run_parts * (num_segments + 1));
      half.runs = arena.take<int64_t>(half.most_runs());
      half.num_runs = arena.take<int64_t>(1);
      half.run_sum = arena.take<Acc<T>>(half.most_runs() * dim);
      if constexpr (std::is_same_v<T, Acc<T>>) {
        half.sum = out;
        if (p == 0) continue;
      }
      half.sum = arena.take<Acc<T>>(num_segments * dim);
    }
  }
};

// Adds a row: sum = before + scale * row.
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
    add(Vector<T, 32>{});  // half a cache line, the minimum width of a thread's columns
  }
  for (; j < width; ++j) sum[j] = before[j] + (kScaled ? scale * load(row[j]) : load(row[j]));
}

// A row to add, and its segment's progress before the addition.
template <class T>
struct Addition {
  const T* row;
  Progress before;
};

// Selects one of two numbers without a branch. For ?:, the compiler emits a branch that is often
// mispredicted.
template <class I>
inline I select(bool first, I one, I other) {
  return other ^ ((one ^ other) & -static_cast<I>(first));
}

// Assigns a run to one of `run_parts` threads. Sums at neighbouring offsets get the same thread,
// since they may share a cache line. The hash needs no seed: ids chosen to collide can only give
// all the work to one thread.
inline int64_t part_of_run(int64_t offset, int64_t run_parts) {
  return bucket_of_hash(hash_key(offset >> 6), run_parts);
}

// Returns ids [begin, end) as an int64 array; int32 ids are converted into the buffer `space`.
inline const int64_t* as_int64(const EntryNumbers& ids, int64_t begin, int64_t end,
                               int64_t* space) {
  if (ids.wide != nullptr) return ids.wide + begin;
  std::copy(ids.narrow + begin, ids.narrow + end, space);
  return space;
}

// Sums one thread's part of a half: its columns, and only the runs assigned to it. kWidth is the
// number of columns, or 0 if it is not a constant. Returns -1, or the first position whose id is >=
// num_segments.
//
// For each block of entries, the first loop lists the additions and the second loop performs them.
// A branch on whether an entry is the first of its segment would be mispredicted, so the first loop
// has none. Both loops can prefetch far ahead.
template <int kWidth, class T, class Entries>
int64_t sum_part(const EntryNumbers& ids, int64_t dim, int64_t num_segments, const Entries& entries,
                 const SegmentWorkspace<T>& work, const Half<T>& half, int64_t part) {
  using A = Acc<T>;
  const int64_t column_part = part % work.column_parts, run_part = part / work.column_parts;
  const int64_t column = dim * column_part / work.column_parts;
  const int64_t width = kWidth > 0 ? kWidth : dim * (column_part + 1) / work.column_parts - column;
  const bool shares_runs = work.run_parts > 1;

  Progress* progress = half.progress + part * (num_segments + 1);
  for (int64_t s = 0; s <= num_segments; ++s) progress[s] = run_begins_at(s * dim);
  int64_t num_runs = 0;
  // Use integers as addresses: the sums of first runs and those of later runs are in different
  // arrays.
  const auto zeros = reinterpret_cast<uintptr_t>(work.zeros);
  const auto sums = reinterpret_cast<uintptr_t>(half.sum + column);
  const int64_t to_run_sum = static_cast<int64_t>(reinterpret_cast<uintptr_t>(half.run_sum) -
                                                  reinterpret_cast<uintptr_t>(half.sum)) /
                             static_cast<int64_t>(sizeof(A));

  constexpr int64_t kBlock = 1024;
  constexpr int64_t kAhead = 32;
  const int64_t last = half.end - 1;
  const int64_t distance = rows_ahead<A>(width);
  Addition<T> additions[kBlock + kRowsAhead];
  A scales[Entries::scaled ? kBlock : 1];
  int64_t space[kBlock + kAhead];
  const auto ask_for_progress = [=](int64_t id) {  // also works for invalid ids
    prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(progress) +
                                           static_cast<uintptr_t>(id) * sizeof(Progress)));
  };
  const auto sum_of = [=](Progress before) {
    return sums + static_cast<uintptr_t>(before >> kMetBits) * sizeof(A);
  };
  const auto ask_for = [&](const Addition<T>& addition) {
    prefetch_row(addition.row, width);
    prefetch_row(reinterpret_cast<const A*>(sum_of(addition.before)), width);
  };
  for (int64_t block = half.begin; block < half.end; block += kBlock) {
    const int64_t end = std::min(half.end, block + kBlock);
    const int64_t* block_ids = as_int64(ids, block, std::min(half.end, end + kAhead), space);
    int64_t count = 0, largest = -1;
    const auto write_down = [&](int64_t i, const T* row, A scale) {
      // List dropped entries as well, to avoid a branch. The next entry overwrites them.
      const int64_t given = block_ids[i - block];
      largest = std::max(largest, given);
      const bool counts = static_cast<uint64_t>(given) < static_cast<uint64_t>(num_segments);
      const int64_t id = select(counts, given, num_segments);
      ask_for_progress(block_ids[std::min(i + kAhead, last) - block]);
      Progress before = progress[id];
      if ((before & kMet) == kRun) {
        if (part == 0) half.runs[num_runs] = id;
        before = run_begins_at(to_run_sum + num_runs++ * dim);
      }
      progress[id] = before + counts;
      additions[count] = {row + column, before};
      if constexpr (Entries::scaled) scales[count] = scale;
      count += counts;
    };
    entries.visit(block, end, write_down);
    if (largest >= num_segments) {
      const auto beyond = [=](int64_t id) { return id >= num_segments; };
      return block + (std::find_if(block_ids, block_ids + (end - block), beyond) - block_ids);
    }
    if (shares_runs) {
      int64_t own = 0;
      for (int64_t k = 0; k < count; ++k) {
        additions[own] = additions[k];
        if constexpr (Entries::scaled) scales[own] = scales[k];
        own += part_of_run(additions[k].before >> kMetBits, work.run_parts) == run_part;
      }
      count = own;
    }
    if (count == 0) continue;
    std::fill_n(additions + count, distance, additions[count - 1]);
    for (int64_t k = 0; k < distance; ++k) ask_for(additions[k]);
    for (int64_t k = 0; k < count; ++k) {
      ask_for(additions[k + distance]);
      const auto [row, before] = additions[k];
      const uintptr_t sum = sum_of(before);
      // Start from zeros if nothing has been added to the sum yet, so that sums need not be
      // cleared.
      const uintptr_t old = select((before & kMet) == 0, zeros, sum);
      add_row<Entries::scaled>(row, scales[Entries::scaled ? k : 0],
                               reinterpret_cast<const A*>(old), width, reinterpret_cast<A*>(sum));
    }
  }
  if (part == 0) *half.num_runs = num_runs;
  return -1;
}

// Calls `sum` with the width as a constant if it is one of kWidths, otherwise with 0.
template <int... kWidths, class Sum>
void with_width(int64_t width, const Sum& sum) {
  const auto is = [&](auto known) {
    if (width == known.value) sum(known);
    return width == known.value;
  };
  if (!(is(std::integral_constant<int, kWidths>{}) || ...)) sum(std::integral_constant<int, 0>{});
}

// Computes out[s] = sum of scale * row[0 : dim] over the entries i with ids[i] = s. A segment
// without entries gets zeros. The type Entries has `scaled`, which is true if a scale may differ
// from 1, and visit(begin, end, f), which calls f(i, row, scale) for each position i in [begin,
// end). Returns -1, or the first position whose id is >= num_segments.
template <class T, class Entries>
int64_t reduce_segments(const EntryNumbers& ids, int64_t n, int64_t dim, int64_t num_segments,
                        const Entries& entries, void* workspace, T* out,
                        const ParallelFor& parallel_for) {
  if (n == 0 || dim == 0) {
    for (int64_t i = 0; i < n; ++i) {
      if (ids[i] >= num_segments) return i;
    }
    parallel_for(0, num_segments * dim, kLeastWork,
                 [=](int64_t begin, int64_t end) { std::fill(out + begin, out + end, T{}); });
    return -1;
  }
  Arena arena(workspace);
  const SegmentWorkspace<T> work(arena, n, dim, num_segments, out, parallel_for);
  std::fill_n(work.zeros, dim, Acc<T>{});
  FirstBad bad;
  const int64_t parts = work.column_parts * work.run_parts;
  parallel_for.each(work.num_halves * parts, [&](int64_t p) {
    const auto sum = [&](auto width) {
      const int64_t position = sum_part<width.value>(ids, dim, num_segments, entries, work,
                                                     work.halves[p / parts], p % parts);
      if (position >= 0) bad.report(position);
    };
    with_width<8, 16, 32, 64, 128, 256>(dim % work.column_parts == 0 ? dim / work.column_parts : 0,
                                        sum);
  });
  if (bad.position() >= 0) return bad.position();

  parallel_for(0, num_segments, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t p = 0; p < work.num_halves; ++p) work.halves[p].add_runs(begin, end, dim);
    for (int64_t s = begin; s < end; ++s) {
      T* target = out + s * dim;
      const Acc<T>* sum = work.halves[0].total(s, dim);
      const Acc<T>* other = work.num_halves == 2 ? work.halves[1].total(s, dim) : nullptr;
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
