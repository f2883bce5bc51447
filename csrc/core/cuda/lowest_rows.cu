// Finds the rows with the lowest scores, using a radix selection instead of a sort.
#include "sparsekit/lowest_rows.h"

#include "cuda/prefix_sum.cuh"

namespace sparsekit::cuda {
namespace {

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;
constexpr int kDigitsOfThread = kDigits / kSumThreads;

// Bits [shift, end) of an order or a hash: the digit used in one round of counting rows.
struct Digit {
  int shift, end;

  explicit Digit(int end) : shift(end > kDigitBits ? end - kDigitBits : 0), end(end) {}

  SPARSEKIT_DEVICE int of(uint64_t value) const {
    return static_cast<int>(value >> shift & ((uint64_t{1} << (end - shift)) - 1));
  }
  // Returns true if two values have the same bits above this digit.
  SPARSEKIT_DEVICE bool same_above(uint64_t one, uint64_t other) const {
    return end == 64 || one >> end == other >> end;
  }
};

// Determines the rows to take: all rows with a lower order, and rows with this order whose hash is
// at most this one. Digits that are not yet known are zeros.
struct Limit {
  uint64_t order, hash;
  int64_t missing;  // number of rows to take among those with the same digits; 0 if all are known
};

// Rows, with their orders mapped to unsigned numbers that compare the same way.
struct Candidates {
  ScoredRows table;
  uint32_t* pinned;  // a bit for each row
  int64_t* keys;     // [size] keys of the rows up to the limit's order
  Limit* limit;

  SPARSEKIT_DEVICE bool is_free(int64_t row) const {
    return (pinned[row / 32] >> (row % 32) & 1) == 0;
  }
  SPARSEKIT_DEVICE uint64_t order(const LfuClock& clock, int64_t row) const {
    return static_cast<uint64_t>(table.order(clock, row)) ^ uint64_t { 1 } << 63;
  }
};

SPARSEKIT_KERNEL mark_pinned_kernel(Candidates rows) {
  const ScoredRows& table = rows.table;
  if (simt::global_thread() == 0) *rows.limit = {0, 0, table.count};
  for (int64_t i = simt::global_thread(); i < table.num_pinned; i += simt::global_threads()) {
    const int64_t row = table.pinned[i];
    if (row >= 0 && row < table.size) {
      simt::atomic_or(rows.pinned + row / 32, uint32_t{1} << (row % 32));
    }
  }
}

// Counts the free rows (those not pinned) by one digit of their order or, among rows with the
// limit's order, by one digit of their hash. Only rows whose higher digits equal the limit's are
// counted.
template <bool kOfHash>
SPARSEKIT_KERNEL count_digits_kernel(Candidates rows, Digit digit, int32_t* counts) {
  const Limit limit = *rows.limit;
  if (limit.missing == 0) return;
  auto* in_block = simt::shared<int32_t>();
  for (int d = simt::thread(); d < kDigits; d += simt::block_size()) in_block[d] = 0;
  simt::barrier();
  const LfuClock clock = rows.table.clock();
  for (int64_t row = simt::global_thread(); row < rows.table.size; row += simt::global_threads()) {
    if (!rows.is_free(row)) continue;
    uint64_t value = rows.order(clock, row), at = limit.order;
    if constexpr (kOfHash) {
      if (value != limit.order) continue;
      value = hash_key(rows.keys[row]);
      at = limit.hash;
    }
    if (digit.same_above(value, at)) simt::atomic_add(in_block + digit.of(value), int32_t{1});
  }
  simt::barrier();
  for (int d = simt::thread(); d < kDigits; d += simt::block_size()) {
    if (in_block[d] != 0) simt::atomic_add(counts + d, in_block[d]);
  }
}

// Finds the digit value at which the running count reaches the number of rows to take, and clears
// the counts. Runs in one block.
template <bool kOfHash>
SPARSEKIT_KERNEL choose_digit_kernel(Limit* limit, Digit digit, int32_t* counts) {
  Limit now = *limit;
  const int first = simt::thread() * kDigitsOfThread;
  int32_t own[kDigitsOfThread];
  int64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kDigitsOfThread; ++i) {
    sum += own[i] = counts[first + i];
    counts[first + i] = 0;
  }
  int64_t before = sum_before(sum);
  if (now.missing == 0) return;
  const auto all = [](int bits) { return bits == 64 ? ~uint64_t{0} : (uint64_t{1} << bits) - 1; };
  const bool is_last = simt::thread() == kSumThreads - 1;
  if (is_last && before + sum < now.missing) *limit = {all(64), all(64), 0};  // take all rows
#pragma unroll
  for (int i = 0; i < kDigitsOfThread; before += own[i++]) {
    if (before >= now.missing || before + own[i] < now.missing) continue;
    uint64_t& value = kOfHash ? now.hash : now.order;
    value |= static_cast<uint64_t>(first + i) << digit.shift;
    now.missing -= before;
    if (now.missing == own[i]) {  // take all these rows, whatever their lower digits are
      value |= all(digit.shift);
      if (!kOfHash) now.hash = all(64);
      now.missing = 0;
    }
    *limit = now;
    return;
  }
}

// Writes the keys of the free rows up to the limit's order.
SPARSEKIT_KERNEL read_keys_kernel(Candidates rows) {
  const ScoredRows& table = rows.table;
  const LfuClock clock = table.clock();
  const uint64_t limit = rows.limit->order;
  const int64_t slots = table.num_buckets * kSlotsPerBucket;
  for (int64_t i = simt::global_thread(); i < slots; i += simt::global_threads()) {
    const Bucket& bucket = table.buckets[i / kSlotsPerBucket];
    const int64_t row = bucket.rows[i % kSlotsPerBucket];
    if (row < 0 || row >= table.size || !rows.is_free(row) || rows.order(clock, row) > limit) {
      continue;
    }
    // Use a relaxed store, since in a damaged table two slots may have the same row.
    simt::store(rows.keys + row, bucket.keys[i % kSlotsPerBucket]);
  }
}

SPARSEKIT_KERNEL take_rows_kernel(Candidates rows, LookBack totals, LowestRows found,
                                  int64_t* num_found) {
  const int64_t tile = totals.take_tile();
  const int64_t row = tile * kSumThreads + simt::thread();
  const ScoredRows& table = rows.table;
  const LfuClock clock = table.clock();
  const Limit limit = *rows.limit;
  bool is_taken = row < table.size && rows.is_free(row);
  if (is_taken) {
    const uint64_t order = rows.order(clock, row);
    is_taken = order < limit.order ||
               (order == limit.order &&
                (limit.hash == ~uint64_t{0} || hash_key(rows.keys[row]) <= limit.hash));
  }
  const int64_t before = totals.sum_before_in_launch(tile, is_taken);
  if (is_taken && before < table.count) {
    found.rows[before] = row;
    found.orders[before] = table.order(clock, row);
    found.keys[before] = rows.keys[row];
  }
  if (tile == totals.tiles - 1 && simt::thread() == kSumThreads - 1) {
    const int64_t all = before + is_taken;
    *num_found = all < table.count ? all : table.count;
  }
}

struct Work {
  int64_t words;
  uint32_t* pinned;
  int64_t* keys;
  Limit* limit;
  int32_t* counts;
  LookBack totals;

  Work(Arena& arena, int64_t size)
      : words((size + 31) / 32),
        pinned(arena.take<uint32_t>(words)),
        keys(arena.take<int64_t>(size)),
        limit(arena.take<Limit>(1)),
        counts(arena.take<int32_t>(kDigits)),
        totals(arena, (size + kSumThreads - 1) / kSumThreads, 1) {}
};

template <bool kOfHash>
void find_limit(const Candidates& rows, int32_t* counts, void* stream) {
  simt::Grid grid = simt::strided_grid_for(rows.table.size);
  grid.shared_bytes = kDigits * static_cast<int64_t>(sizeof(int32_t));
  for (int end = 64; end > 0; end -= kDigitBits) {
    simt::launch("lowest_rows: count", count_digits_kernel<kOfHash>, grid, stream, rows, Digit(end),
                 counts);
    simt::launch("lowest_rows: choose", choose_digit_kernel<kOfHash>, sum_grid(1), stream,
                 rows.limit, Digit(end), counts);
  }
}

}  // namespace

int64_t lowest_rows_workspace_bytes(int64_t size) {
  return Arena::bytes_of<Work>(size);
}

void lowest_rows(const ScoredRows& table, const LowestRows& found, int64_t* num_found,
                 void* workspace, void* stream) {
  if (table.count <= 0 || table.size == 0) {
    return simt::fill_bytes(num_found, 0, sizeof(int64_t), stream);
  }
  Arena arena(workspace);
  const Work work(arena, table.size);
  const Candidates rows{table, work.pinned, work.keys, work.limit};
  simt::fill_bytes(work.pinned, 0, work.words * static_cast<int64_t>(sizeof(uint32_t)), stream);
  simt::fill_bytes(work.keys, 0, table.size * static_cast<int64_t>(sizeof(int64_t)), stream);
  simt::fill_bytes(work.counts, 0, kDigits * static_cast<int64_t>(sizeof(int32_t)), stream);
  simt::fill_bytes(work.totals.words, 0xFF,
                   (work.totals.end() - work.totals.words) * static_cast<int64_t>(sizeof(int64_t)),
                   stream);
  simt::launch("lowest_rows: pin", mark_pinned_kernel, simt::strided_grid_for(table.num_pinned),
               stream, rows);
  find_limit<false>(rows, work.counts, stream);
  simt::launch("lowest_rows: keys", read_keys_kernel,
               simt::strided_grid_for(table.num_buckets * kSlotsPerBucket), stream, rows);
  find_limit<true>(rows, work.counts, stream);
  simt::launch("lowest_rows: take", take_rows_kernel, sum_grid(work.totals.tiles), stream, rows,
               work.totals, found, num_found);
}

}  // namespace sparsekit::cuda
