// Sums of rows by segment; shared by segment_sum and the backward of embedding_bag, which differ
// only in where the rows lie and what they are multiplied by.
//
// Entries of a segment are added in the order of their positions, in runs of kRun; then the sums of
// the runs are. So the order of additions depends on the ids alone, and a long sum in float stays
// accurate.
//
// Threads share out the columns: each goes through all ids and adds its columns of every row to
// sums in memory. So the rows are read once and in order, nobody has more to do than others however
// the ids are spread, and nothing is sorted. Threads beyond what columns there are share out runs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cpu/sum_rows.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

constexpr int64_t kRun = 1024;

// Elements that are worth a thread.
constexpr int64_t kLeastWork = 32768;

// Bytes of a row that are worth a thread: half a cache line.
constexpr int64_t kLeastWidth = 32;

// Workspace of a segment reduction, laid out in one block of memory. k counts entries in the order
// of segments.
template <class T>
struct SegmentWorkspace {
  int64_t column_parts, run_parts;
  int64_t* start;     // [num_segments + 1] k of the first entry of each segment
  uint64_t* is_long;  // [num_segments / 64] bits: has it more than one run?
  int64_t* seen;    // [parts, chunks] entries met so far of the long segment that starts in a chunk
  Acc<T>* run_sum;  // [2 * chunks, dim] of segments of more than one run
  Acc<T>* sum;      // [num_segments, dim], where rows are not of the type that sums are of
  int64_t bytes;

  // Of n entries; a run belongs to the chunk that it starts in. A chunk can have two runs of long
  // segments: the last of one and the first of another.
  static int64_t num_chunks(int64_t n) { return (n + kRun - 1) / kRun; }

  SegmentWorkspace(void* memory, int64_t n, int64_t dim, int64_t num_segments,
                   const ParallelFor& parallel_for) {
    const int64_t threads = std::clamp<int64_t>(n * std::max<int64_t>(dim, 1) / kLeastWork, 1,
                                                parallel_for.num_threads());
    const int64_t row_bytes = dim * static_cast<int64_t>(sizeof(Acc<T>));
    column_parts = std::clamp<int64_t>(row_bytes / kLeastWidth, 1, threads);
    run_parts = threads / column_parts;
    bytes = 0;
    const auto take = [&](auto*& array, int64_t count) {
      array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(
          static_cast<char*>(memory) + bytes);
      bytes += count * static_cast<int64_t>(sizeof(*array));
    };
    take(start, num_segments + 1);
    take(is_long, num_segments / 64 + 1);
    take(seen, column_parts * run_parts * num_chunks(n));
    take(run_sum, 2 * num_chunks(n) * dim);
    take(sum, std::is_same_v<T, Acc<T>> ? 0 : num_segments * dim);
  }

  // Sum of the run that starts at entry k.
  Acc<T>* sum_of_run(int64_t k, bool first_of_segment, int64_t dim) const {
    return run_sum + (2 * (k / kRun) + (first_of_segment ? 1 : 0)) * dim;
  }
};

// Fills `start` and `is_long`. Returns -1, or the first position whose id is >= num_segments.
inline int64_t count_segments(const int64_t* ids, int64_t n, int64_t num_segments, int64_t* start,
                              uint64_t* is_long) {
  std::fill(start, start + num_segments + 1, int64_t{0});
  for (int64_t i = 0; i < n; ++i) {
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

// sum += scale * row.
template <bool kScaled, class T>
inline void add_row(const T* row, Acc<T> scale, int64_t width, Acc<T>* sum) {
  int64_t rest = 0;
  if constexpr (std::is_same_v<T, Acc<T>>) {
    rest = width / kLanes<T> * kLanes<T>;
    for (int64_t j = 0; j < rest; j += kLanes<T>) {
      const Vector<T> x = load_vector(row + j);
      put_at(sum + j, load_vector(sum + j) + (kScaled ? scale * x : x));
    }
  }
  for (int64_t j = rest; j < width; ++j) sum[j] += kScaled ? scale * load(row[j]) : load(row[j]);
}

template <class A>
inline void clear_row(A* row, int64_t width) {
  const int64_t rest = width / kLanes<A> * kLanes<A>;
  for (int64_t j = 0; j < rest; j += kLanes<A>) put_at(row + j, Vector<A>{});
  for (int64_t j = rest; j < width; ++j) row[j] = A{};
}

// One thread's part: columns of the runs that start at entries low, ..., high - 1. kWidth is their
// number, or 0 for any.
template <int kWidth, class T, class Entries>
void sum_part(const int64_t* ids, int64_t n, int64_t dim, int64_t num_segments,
              const Entries& entries, const SegmentWorkspace<T>& work, int64_t part, Acc<T>* sums) {
  using A = Acc<T>;
  const int64_t* start = work.start;
  const int64_t* bound = start + num_segments;
  const int64_t column_part = part % work.column_parts, run_part = part / work.column_parts;
  const int64_t column = dim * column_part / work.column_parts;
  const int64_t width = kWidth > 0 ? kWidth : dim * (column_part + 1) / work.column_parts - column;
  const int64_t low = *bound * run_part / work.run_parts;
  const int64_t high = *bound * (run_part + 1) / work.run_parts;

  const bool shares_runs = work.run_parts > 1;
  const bool last_part = run_part + 1 == work.run_parts;
  const int64_t first = run_part == 0 ? 0 : std::lower_bound(start, bound, low) - start;
  const int64_t last = last_part ? num_segments : std::lower_bound(start, bound, high) - start;
  for (int64_t s = first; s < last; ++s) clear_row(sums + s * dim + column, width);
  int64_t* seen = work.seen + part * SegmentWorkspace<T>::num_chunks(n);
  std::fill(seen, seen + SegmentWorkspace<T>::num_chunks(n), int64_t{0});

  // Rows come in order, which the hardware sees by itself; asking for them as well makes it slower.
  constexpr int64_t kBlock = 512;
  const T* rows[kBlock];
  A scales[kBlock];
  for (int64_t block = 0; block < n; block += kBlock) {
    const int64_t end = std::min(n, block + kBlock);
    entries.visit(block, end, [&](int64_t i, const T* row, A scale) {
      rows[i - block] = row + column;
      scales[i - block] = scale;
    });
    for (int64_t i = block; i < end; ++i) {
      prefetch_row(sums + ids[std::min(i + kRowsAhead, n - 1)] * dim + column, width);
      const int64_t id = ids[i];
      if (id < 0) continue;
      A* sum = sums + id * dim;
      int64_t k = shares_runs ? start[id] : 0;
      if (work.is_long[id / 64] >> id % 64 & 1) {
        const int64_t met = seen[start[id] / kRun]++;
        k = start[id] + met / kRun * kRun;
        sum = work.sum_of_run(k, met < kRun, dim);
        if (met % kRun == 0 && k >= low && k < high) clear_row(sum + column, width);
      }
      if (shares_runs && (k < low || k >= high)) continue;
      add_row<Entries::scaled>(rows[i - block], scales[i - block], width, sum + column);
    }
  }
}

// out[s] = sum over the entries i with ids[i] = s of scale * row[0 : dim]; zeros if there are none.
// Entries has `scaled`, whether there is a scale other than 1, and `visit(begin, end, f)`, which
// calls f(i, row, scale) for the positions of a range. Returns as count_segments.
template <class T, class Entries>
int64_t reduce_segments(const int64_t* ids, int64_t n, int64_t dim, int64_t num_segments,
                        const Entries& entries, void* workspace, T* out,
                        const ParallelFor& parallel_for) {
  const SegmentWorkspace<T> work(workspace, n, dim, num_segments, parallel_for);
  const int64_t bad = count_segments(ids, n, num_segments, work.start, work.is_long);
  if (bad >= 0) return bad;
  Acc<T>* sums = work.sum;
  if constexpr (std::is_same_v<T, Acc<T>>) sums = out;

  parallel_for(0, work.column_parts * work.run_parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      const auto sum = [&](auto width) {
        sum_part<width.value>(ids, n, dim, num_segments, entries, work, p, sums);
      };
      switch (dim % work.column_parts == 0 ? dim / work.column_parts : 0) {
        case 8:
          sum(std::integral_constant<int, 8>{});
          break;
        case 16:
          sum(std::integral_constant<int, 16>{});
          break;
        case 32:
          sum(std::integral_constant<int, 32>{});
          break;
        case 64:
          sum(std::integral_constant<int, 64>{});
          break;
        case 128:
          sum(std::integral_constant<int, 128>{});
          break;
        default:
          sum(std::integral_constant<int, 0>{});
      }
    }
  });

  const int64_t* start = work.start;
  parallel_for(0, num_segments, 4096, [&](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      const Acc<T>* sum = sums + s * dim;
      if (start[s + 1] - start[s] > kRun) {
        Acc<T>* total = work.sum_of_run(start[s], true, dim);
        for (int64_t k = start[s] + kRun; k < start[s + 1]; k += kRun) {
          const Acc<T>* run = work.sum_of_run(k, false, dim);
          for (int64_t j = 0; j < dim; ++j) total[j] += run[j];
        }
        sum = total;
      }
      if constexpr (std::is_same_v<T, Acc<T>>) {
        if (sum == out + s * dim) continue;
      }
      for (int64_t j = 0; j < dim; ++j) out[s * dim + j] = store<T>(sum[j]);
    }
  });
  return -1;
}

}  // namespace sparsekit::cpu
