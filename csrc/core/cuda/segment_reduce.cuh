// Sums rows by segment on a device. segment_sum and the backward pass of embedding_bag share this
// code; they differ only in each entry's row and in the scale of that row.
//
// There are two methods. In order: entries are sorted by segment, then each tile adds a fixed chunk
// of the sorted entries. A segment that crosses a chunk's bounds leaves partial sums, which are the
// entries of the next level, and so on until one chunk is left. So all tiles of the device share
// the work on a frequent segment, and the order of additions depends only on the ids. With atomics:
// the entries are added in a single pass, in the given order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/primitives.h"
#include "cuda/row_shape.h"
#include "cuda/simt.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::cuda {

// Number of sorted entries per tile. It is even, so that both partial sums of a chunk are in one
// chunk of the next level.
constexpr uint32_t kChunk = 64;

// A row and its scale.
template <class A>
struct alignas(2 * sizeof(A)) ScaledRow {
  int32_t row;  // negative if the row is zeros
  A scale;
};

// Maps the value of an entry to a row. If `scaled` is given, scaled[value] has the row and its
// scale; otherwise the value is the row.
template <class S>
struct Rows {
  using Scalar = S;

  const S* rows;
  const ScaledRow<Acc<S>>* scaled;
  int64_t dim, stride;

  SPARSEKIT_DEVICE ScaledRow<Acc<S>> find(int32_t value) const {
    if (value < 0) return {-1, Acc<S>{0}};
    return scaled == nullptr ? ScaledRow<Acc<S>>{value, Acc<S>{1}} : scaled[value];
  }
  template <int kWidth>
  SPARSEKIT_DEVICE void read(int32_t row, int64_t element, RowPiece<S, kWidth>& piece) const {
    piece = {};
    if (row >= 0 && element < dim) piece.read(rows + row * stride + element);
  }
};

// `key` is the segment of the entry, or num_segments if the entry is dropped. `value` is mapped to
// a row; a negative value marks an absent entry.
struct Entry {
  uint32_t key;
  int32_t value;
};

// Position, relative to a tile's range, of a run of entries with equal keys. kWhole: entirely
// inside. kHead: begins before the range. kTail: begins inside and continues past the end.
enum class Run { kWhole, kHead, kTail };

// Goes through the range [begin, end) of n entries that are sorted by key. The range has at least
// one entry. Calls put(run, key, sum) for every run with an entry that is not absent; `sum` is the
// sum of the run's rows in the range, added in order. entry(k) must work for k in [max(begin - 1,
// 0), min(end, n - 1)]. Positions are unsigned because n < 2^31 and they may slightly exceed n.
template <int kWidth, class RowsOf, class EntryAt, class Put>
SPARSEKIT_DEVICE void sum_runs(uint32_t begin, uint32_t end, uint32_t n, int64_t element,
                               const RowsOf& rows, const EntryAt& entry, const Put& put) {
  using S = typename RowsOf::Scalar;
  // Repeats the last entry's key past the end, so that no run appears to end there.
  const auto entry_or_none = [&](uint32_t k) {
    Entry found = entry(k < end ? k : end - 1);
    if (k >= end) found.value = -1;
    return found;
  };
  Entry next[kInFlight];
  for (int j = 0; j < kInFlight; ++j) next[j] = entry_or_none(begin + j);
  uint32_t key = next[0].key;
  bool head = begin > 0 && entry(begin - 1).key == key;
  bool any = false;
  Acc<S> sum[kWidth] = {};
  for (uint32_t k = begin; k < end; k += kInFlight) {
    Entry now[kInFlight];
    ScaledRow<Acc<S>> from[kInFlight];
    RowPiece<S, kWidth> piece[kInFlight];
    for (int j = 0; j < kInFlight; ++j) now[j] = next[j];
    for (int j = 0; j < kInFlight; ++j) from[j] = rows.find(now[j].value);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) rows.read(from[j].row, element, piece[j]);
    for (int j = 0; j < kInFlight; ++j) next[j] = entry_or_none(k + kInFlight + j);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (now[j].key != key) {
        if (any) put(head ? Run::kHead : Run::kWhole, key, sum);
        key = now[j].key;
        head = any = false;
        for (int i = 0; i < kWidth; ++i) sum[i] = 0;
      }
      any = any || now[j].value >= 0;
      for (int i = 0; i < kWidth; ++i) sum[i] += from[j].scale * load(piece[j].at(i));
    }
  }
  const bool goes_on = end < n && entry(end).key == key;
  if (any) put(head ? Run::kHead : goes_on ? Run::kTail : Run::kWhole, key, sum);
}

// Returns the segment of entry i as a sort key. Reports an id that is too large.
SPARSEKIT_DEVICE uint32_t segment_key(int64_t id, int64_t i, int64_t num_segments, bool report,
                                      int64_t* bad) {
  if (id >= num_segments && report) simt::atomic_min(bad, i);
  return static_cast<uint32_t>(id < 0 || id >= num_segments ? num_segments : id);
}

// The terms of the sums. Entry i, for i in [0, n), adds row values[i] to segment ids[i]; if
// `values` is null, it adds row i. Entries with a negative value or id are dropped. *bad is set as
// in unsorted_segment_sum.
struct Segments {
  const int64_t* ids;
  const int32_t* values;
  int64_t n;
  int64_t num_segments;
  int64_t* bad;
};

// ---- in order ----

// The entries of a level. At level 0, their rows are the caller's rows. At other levels, their rows
// are partial sums. Each chunk of the previous level leaves two partial sums: one for a run that
// began before the chunk, and one for a run that continues after it.
template <class T>
struct Level {
  uint32_t* keys;
  int32_t* values;
  Acc<T>* rows;
  int64_t n;

  void take(Arena& arena, int64_t entries, int64_t dim) {
    keys = arena.take<uint32_t>(entries);
    values = arena.take<int32_t>(entries);
    rows = arena.take<Acc<T>>(entries * dim);
    n = entries;
  }
};

template <class T>
struct SegmentWorkspace {
  static constexpr int kMaxLevels = 8;  // 6 levels if n < 2^31, plus the output of the last level

  uint32_t* keys;      // [n] keys of the entries, unsorted
  int32_t* positions;  // [n]
  uint32_t* present;   // one bit per segment, set if it has entries
  char* sort;
  Level<T> levels[kMaxLevels];
  int num_levels = 0;

  SegmentWorkspace(Arena& arena, int64_t n, int64_t dim, int64_t num_segments)
      : keys(arena.take<uint32_t>(n)),
        positions(arena.take<int32_t>(n)),
        present(arena.take<uint32_t>(present_words(num_segments))),
        sort(arena.take<char>(sort_workspace_bytes(n))) {
    levels[num_levels++].take(arena, n, 0);
    for (int64_t entries = n; entries > 0;) {
      const int64_t chunks = (entries + kChunk - 1) / kChunk;
      entries = 2 * chunks;
      levels[num_levels++].take(arena, entries, dim);
      if (chunks == 1) break;
    }
  }

  static int64_t present_words(int64_t num_segments) { return (num_segments + 31) / 32; }
};

SPARSEKIT_KERNEL segment_keys_kernel(Segments in, uint32_t* keys, int32_t* positions) {
  const int64_t i = simt::global_thread();
  if (i >= in.n) return;
  uint32_t key = segment_key(in.ids[i], i, in.num_segments, true, in.bad);
  if (in.values == nullptr) {
    positions[i] = static_cast<int32_t>(i);
  } else if (in.values[i] < 0) {
    key = static_cast<uint32_t>(in.num_segments);
  }
  keys[i] = key;
}

// Sums the runs of `from`, with one chunk per tile. Sums of whole runs are written to `out`, other
// sums to `to`. `present` is given only at level 0.
template <class T, class S, int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    sum_chunks_kernel(Level<T> from, Rows<S> rows, int64_t num_segments, int log2_lanes,
                      Level<T> to, uint32_t* present, T* out) {
  const int64_t element = first_element(kWidth, log2_lanes);
  const auto n = static_cast<uint32_t>(from.n);
  const auto chunk = static_cast<uint32_t>(tile_of_thread(log2_lanes));
  const uint32_t begin = chunk * kChunk;
  if (begin >= n) return;
  const uint32_t end = n - begin > kChunk ? begin + kChunk : n;
  const auto entry = [&](uint32_t k) {
    Entry found{from.keys[k], from.values[k]};
    if (found.key >= num_segments) found.value = -1;
    return found;
  };
  bool has_head = false, has_tail = false;
  sum_runs<kWidth>(begin, end, n, element, rows, entry,
                   [&](Run run, uint32_t key, const Acc<S>(&sum)[kWidth]) {
                     if (run != Run::kHead && present != nullptr && element == 0) {
                       simt::atomic_or(present + key / 32, 1u << key % 32);
                     }
                     has_head = has_head || run == Run::kHead;
                     has_tail = has_tail || run == Run::kTail;
                     if (element >= rows.dim) return;
                     if (run == Run::kWhole) {
                       write_row(out + key * rows.dim + element, sum);
                     } else {
                       const int64_t slot = 2 * chunk + (run == Run::kTail ? 1 : 0);
                       write_row(to.rows + slot * rows.dim + element, sum);
                     }
                   });
  if (element > 0) return;
  // Give a key even to slots without a sum, so that the next level's entries are sorted.
  to.keys[2 * chunk] = from.keys[begin];
  to.keys[2 * chunk + 1] = from.keys[end - 1];
  to.values[2 * chunk] = has_head ? static_cast<int32_t>(2 * chunk) : -1;
  to.values[2 * chunk + 1] = has_tail ? static_cast<int32_t>(2 * chunk + 1) : -1;
}

// Writes zeros for segments without entries. Each warp handles one word of `present`.
template <class T, int kWidth>
SPARSEKIT_KERNEL zero_absent_kernel(const uint32_t* present, int64_t num_segments, int64_t dim,
                                    int log2_lanes, T* out) {
  const int64_t word = simt::global_thread() / simt::kWarp;
  const int64_t element = first_element(kWidth, log2_lanes);
  if (word * 32 >= num_segments || element >= dim) return;
  const uint32_t bits = present[word];
  const Acc<T> zeros[kWidth] = {};
  for (int i = simt::lane() >> log2_lanes; i < 32; i += 32 >> log2_lanes) {
    const int64_t segment = word * 32 + i;
    if (segment < num_segments && (bits >> i & 1) == 0) {
      write_row(out + segment * dim + element, zeros);
    }
  }
}

template <class T, int kWidth>
void reduce_in_order(const Segments& in, const Rows<T>& rows, const RowShape& shape,
                     const SegmentWorkspace<T>& work, T* out, void* stream) {
  // The largest key is num_segments, the key of dropped entries.
  sort_pairs(work.keys, work.levels[0].keys, in.values == nullptr ? work.positions : in.values,
             work.levels[0].values, in.n, bits_of(in.num_segments), work.sort, stream);

  const int64_t words = SegmentWorkspace<T>::present_words(in.num_segments);
  simt::fill_bytes(work.present, 0, words * 4, stream);
  for (int i = 0; i + 1 < work.num_levels; ++i) {
    const Level<T>& from = work.levels[i];
    const Level<T>& to = work.levels[i + 1];
    const simt::Grid grid = grid_for_rows((from.n + kChunk - 1) / kChunk, shape);
    if (i == 0) {
      simt::launch("segment_sum: rows", sum_chunks_kernel<T, T, kWidth>, grid, stream, from, rows,
                   in.num_segments, shape.log2_lanes, to, work.present, out);
    } else {
      const Rows<Acc<T>> sums{from.rows, nullptr, rows.dim, rows.dim};
      simt::launch("segment_sum: partial sums", sum_chunks_kernel<T, Acc<T>, kWidth>, grid, stream,
                   from, sums, in.num_segments, shape.log2_lanes, to, nullptr, out);
    }
  }
  simt::Grid grid = simt::grid_for(words * simt::kWarp);
  grid.columns = shape.columns;
  simt::launch("segment_sum: zeros", zero_absent_kernel<T, kWidth>, grid, stream, work.present,
               in.num_segments, rows.dim, shape.log2_lanes, out);
}

// ---- with atomics ----

// Adds entries to `out`, 32 entries per warp. Entries of the same segment are first brought
// together and added in registers, so that a frequent segment costs one atomic addition per warp.
template <int kWidth>
SPARSEKIT_KERNEL __launch_bounds__(256)
    add_rows_kernel(Segments in, Rows<float> rows, int log2_lanes, float* out) {
  rows.stride = rows.dim;  // already equal; telling the compiler saves two registers
  const int64_t i = simt::global_thread();
  const int64_t element = first_element(kWidth, log2_lanes);
  const int lane = simt::lane();
  Entry mine{static_cast<uint32_t>(in.num_segments), -1};
  if (i < in.n) {
    mine.value = in.values == nullptr ? static_cast<int32_t>(i) : in.values[i];
    const uint32_t key = segment_key(in.ids[i], i, in.num_segments, simt::column() == 0, in.bad);
    if (mine.value >= 0) mine.key = key;
    if (key == in.num_segments) mine.value = -1;
  }

  // Put the warp's entries into shared memory, grouped by key.
  const uint32_t equal = simt::warp_match(mine.key);
  int place = lane;
  if (simt::warp_any(simt::count_bits(equal) > 1)) {
    const int leader = simt::lowest_bit(equal);
    const int group = leader == lane ? simt::count_bits(equal) : 0;
    int up_to_here = group;
    for (int step = 1; step < simt::kWarp; step *= 2) {
      const int before = simt::warp_shuffle(up_to_here, (lane - step) & (simt::kWarp - 1));
      if (lane >= step) up_to_here += before;
    }
    place = simt::warp_shuffle(up_to_here - group, leader) +
            simt::count_bits(simt::lanes_before(equal, lane));
  }
  Entry* entries = simt::shared<Entry>() + (simt::thread() - lane);
  entries[place] = mine;
  simt::warp_sync();

  // Let a tile handle as many entries as it has lanes.
  const int lanes = 1 << log2_lanes;
  const int begin = lane & ~(lanes - 1);
  const auto add = [&](uint32_t key, const float (&sum)[kWidth]) {
    if (element >= rows.dim) return;
    simt::Vec<float, kWidth> vector;
    for (int j = 0; j < kWidth; ++j) vector.at[j] = sum[j];
    simt::reduce_add(out + key * rows.dim + element, vector);
  };
  float head[kWidth] = {}, tail[kWidth] = {};
  bool has_head = false, has_tail = false;
  sum_runs<kWidth>(
      begin, begin + lanes, simt::kWarp, element, rows, [&](uint32_t k) { return entries[k]; },
      [&](Run run, uint32_t key, const float (&sum)[kWidth]) {
        if (run == Run::kWhole) return add(key, sum);
        for (int j = 0; j < kWidth; ++j) {
          if (run == Run::kHead) head[j] = sum[j];
          if (run == Run::kTail) tail[j] = sum[j];
        }
        has_head = has_head || run == Run::kHead;
        has_tail = has_tail || run == Run::kTail;
      });

  // A group that spans several tiles consists of a tail and the heads of the following tiles. Sum
  // the heads; the tile that has the tail then adds the total.
  if (!simt::warp_any(has_tail)) return;
  const int last = begin + lanes - 1;
  const uint32_t last_key = entries[last].key;
  bool on = has_head && entries[begin].key == last_key && last + 1 < simt::kWarp &&
            entries[last + 1].key == last_key;
  for (int step = lanes; step < simt::kWarp; step *= 2) {
    const int from = (lane + step) & (simt::kWarp - 1);
    const bool on_after = simt::warp_shuffle<int>(on, from) != 0;
    for (int j = 0; j < kWidth; ++j) {
      const float more = simt::warp_shuffle(head[j], from);
      if (on) head[j] += more;
    }
    on = on && on_after;
  }
  for (int j = 0; j < kWidth; ++j) {
    tail[j] += simt::warp_shuffle(head[j], (lane + lanes) & (simt::kWarp - 1));
  }
  if (has_tail) add(last_key, tail);
}

template <int kWidth>
void reduce_by_atomics(const Segments& in, const Rows<float>& rows, const RowShape& shape,
                       float* out, void* stream) {
  simt::fill_bytes(out, 0, in.num_segments * rows.dim * static_cast<int64_t>(sizeof(float)),
                   stream);
  simt::Grid grid = simt::grid_for(in.n);
  grid.columns = shape.columns;
  grid.shared_bytes = grid.threads * static_cast<int64_t>(sizeof(Entry));
  simt::launch("segment_sum: atomics", add_rows_kernel<kWidth>, grid, stream, in, rows,
               shape.log2_lanes, out);
}

// Returns true if adding with atomics should be faster. Sorting moves about 76 bytes per entry and
// takes about ten launches. With atomics, rows that do not stay in the L2 cache are read and
// written in memory for every entry. So atomics suit few entries, rows of up to 32 bytes, and
// outputs of up to 32 MiB. All three limits are estimates, not yet measured.
inline bool prefer_atomics(int64_t n, int64_t dim, int64_t num_segments) {
  constexpr int64_t kFewEntries = 32768;
  constexpr int64_t kSmallRow = 8;
  constexpr int64_t kCachedOutput = (int64_t{32} << 20) / static_cast<int64_t>(sizeof(float));
  return n <= kFewEntries || dim <= kSmallRow || num_segments * dim <= kCachedOutput;
}

// ---- with either method ----

// Sets out[s] to the sum of the scaled rows of segment s. A segment without entries gets zeros.
template <class T>
void reduce_segments(const Segments& in, const Rows<T>& rows, bool deterministic, T* out,
                     const SegmentWorkspace<T>& work, void* stream) {
  const RowShape shape = row_shape<T>(rows.dim, rows.rows, out);
  if constexpr (std::is_same_v<T, float>) {
    if (!deterministic && prefer_atomics(in.n, rows.dim, in.num_segments)) {
      const auto reduce = shape.width == 1 ? reduce_by_atomics<1> : reduce_by_atomics<kWide<float>>;
      return reduce(in, rows, shape, out, stream);
    }
  }
  simt::launch("segment_sum: keys", segment_keys_kernel, simt::grid_for(in.n), stream, in,
               work.keys, work.positions);
  if (rows.dim == 0 || in.num_segments == 0) return;
  const auto reduce = shape.width == 1 ? reduce_in_order<T, 1> : reduce_in_order<T, kWide<T>>;
  reduce(in, rows, shape, work, out, stream);
}

}  // namespace sparsekit::cuda
