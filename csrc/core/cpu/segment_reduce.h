// Counting sort by segment and the blocked sum over it; shared by segment_sum and the backward of
// embedding_bag, which differ only in where a row lies and what it is multiplied by.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/sum_rows.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

// Entries a thread sums in one go. A segment that crosses a chunk's bounds is put together from
// partial sums afterwards, so one hot segment is shared by all threads. Fixed, so that the order
// of additions is.
constexpr int64_t kChunk = 1024;

// Workspace of a segment reduction, laid out in one block of memory.
template <class T>
struct SegmentWorkspace {
  int64_t* start;      // [num_segments + 1] first entry of each segment in `order`
  int64_t* order;      // [n] positions sorted by segment, stable
  Acc<T>* first_part;  // [num_chunks, dim] sum of a chunk's entries of its first segment, when
                       // that began in an earlier chunk
  Acc<T>* last_part;   // [num_chunks, dim] the same of its last segment, when that goes on

  static int64_t num_chunks(int64_t n) { return (n + kChunk - 1) / kChunk; }

  static int64_t bytes(int64_t n, int64_t dim, int64_t num_segments) {
    return (num_segments + 1 + n) * static_cast<int64_t>(sizeof(int64_t)) +
           2 * num_chunks(n) * dim * static_cast<int64_t>(sizeof(Acc<T>));
  }

  SegmentWorkspace(void* memory, int64_t n, int64_t dim, int64_t num_segments) {
    start = static_cast<int64_t*>(memory);
    order = start + num_segments + 1;
    first_part = reinterpret_cast<Acc<T>*>(order + n);
    last_part = first_part + num_chunks(n) * dim;
  }
};

// Fills `start` and `order`. Returns -1, or the first position whose id is >= num_segments.
inline int64_t sort_by_segment(const int64_t* ids, int64_t n, int64_t num_segments, int64_t* start,
                               int64_t* order) {
  std::fill(start, start + num_segments + 1, int64_t{0});
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] >= num_segments) return i;
    if (ids[i] >= 0) ++start[ids[i]];
  }
  // start[s] becomes the end of segment s, then the backward pass moves it to its beginning.
  int64_t end = 0;
  for (int64_t s = 0; s < num_segments; ++s) start[s] = end += start[s];
  start[num_segments] = end;
  for (int64_t i = n - 1; i >= 0; --i) {
    if (ids[i] >= 0) order[--start[ids[i]]] = i;
  }
  return -1;
}

// out[s] = sum over the entries i of segment s, in the order of `order`, of
// scale(i) * row(i)[0 : dim]. `ids` are the segments that `order` was sorted by.
template <class T, class RowAt, class ScaleAt>
void reduce_segments(const int64_t* ids, int64_t dim, int64_t num_segments, RowAt row,
                     ScaleAt scale, const SegmentWorkspace<T>& work, T* out,
                     const ParallelFor& parallel_for) {
  const int64_t* start = work.start;
  const int64_t* order = work.order;
  const int64_t n = start[num_segments];
  const int64_t num_chunks = SegmentWorkspace<T>::num_chunks(n);

  parallel_for(0, num_segments, 4096, [=](int64_t begin, int64_t end) {
    for (int64_t s = begin; s < end; ++s) {
      if (start[s] == start[s + 1]) std::fill(out + s * dim, out + (s + 1) * dim, T{});
    }
  });

  parallel_for(0, num_chunks, 1, [=](int64_t first_chunk, int64_t end_chunk) {
    for (int64_t chunk = first_chunk; chunk < end_chunk; ++chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t end = std::min(n, begin + kChunk);
      const auto sorted_row = [=](int64_t k) { return row(order[k]); };
      const auto sorted_scale = [=](int64_t k) { return scale(order[k]); };
      const auto ahead = [=](int64_t k) {
        if (k < n) prefetch_row(row(order[k]), dim);
      };
      for (int64_t k = begin; k < end;) {
        const int64_t segment = ids[order[k]];
        const int64_t stop = std::min(end, start[segment + 1]);
        const bool from_before = start[segment] < begin;
        const bool goes_on = start[segment + 1] > end;
        if (from_before || goes_on) {
          Acc<T>* part = (from_before ? work.first_part : work.last_part) + chunk * dim;
          const auto put = [=](int64_t j, Acc<T> sum) { part[j] = sum; };
          sum_rows<T>(k, stop, dim, sorted_row, sorted_scale, ahead, put);
        } else {
          T* whole = out + segment * dim;
          const auto put = [=](int64_t j, Acc<T> sum) { whole[j] = store<T>(sum); };
          sum_rows<T>(k, stop, dim, sorted_row, sorted_scale, ahead, put);
        }
        k = stop;
      }
    }
  });

  // Segments over several chunks: one last_part, then a first_part of each further chunk.
  for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
    const int64_t segment = ids[order[chunk * kChunk]];
    if (start[segment] >= chunk * kChunk || start[segment] < (chunk - 1) * kChunk) continue;
    Acc<T>* sum = work.last_part + (chunk - 1) * dim;
    for (int64_t c = chunk; c < num_chunks && c * kChunk < start[segment + 1]; ++c) {
      for (int64_t j = 0; j < dim; ++j) sum[j] += work.first_part[c * dim + j];
    }
    for (int64_t j = 0; j < dim; ++j) out[segment * dim + j] = store<T>(sum[j]);
  }
}

}  // namespace sparsekit::cpu
