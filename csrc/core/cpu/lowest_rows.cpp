#include "sparsekit/lowest_rows.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "sparsekit/arena.h"

namespace sparsekit::cpu {
namespace {

constexpr int kDigitBits = 11;
constexpr int kDigits = 1 << kDigitBits;

constexpr int64_t kRowsOfWord = 64;
// Minimum numbers of rows and of buckets per thread.
constexpr int64_t kRows = 1 << 15;
constexpr int64_t kBuckets = 2048;

bool has(const uint64_t* bits, int64_t i) {
  return (bits[i / kRowsOfWord] >> (i % kRowsOfWord) & 1) != 0;
}

struct Work {
  int64_t words;
  int64_t* orders;   // [size]
  uint64_t* pinned;  // [words] a bit for each row
  int32_t* stays;    // [size] the distinct pinned rows
  uint64_t* wanted;  // [words] a bit for each row that may be in the results
  uint64_t* read;    // [size / 64 + 1] a bit for each row whose key is needed
  int32_t* before;   // [words] number of wanted rows in earlier words
  int64_t* keys;     // [size] keys of the wanted rows, in order of row
  int32_t* tied;     // [size] numbers of the wanted rows with the highest order
  uint64_t* lost;    // [words] a bit per wanted row, by number: set if the results leave it out
  uint32_t* digits;  // [kDigits]

  Work(Arena& arena, int64_t size)
      : words((size + kRowsOfWord - 1) / kRowsOfWord),
        orders(arena.take<int64_t>(size)),
        pinned(arena.take<uint64_t>(words)),
        stays(arena.take<int32_t>(size)),
        wanted(arena.take<uint64_t>(words)),
        read(arena.take<uint64_t>(size / kRowsOfWord + 1)),
        before(arena.take<int32_t>(words)),
        keys(arena.take<int64_t>(size)),
        tied(arena.take<int32_t>(size)),
        lost(arena.take<uint64_t>(words)),
        digits(arena.take<uint32_t>(kDigits)) {}
};

// Writes the distinct pinned rows, and returns how many there are.
int64_t list_pinned(const ScoredRows& table, const Work& work) {
  std::fill_n(work.pinned, work.words, uint64_t{0});
  int64_t n = 0;
  for (int64_t i = 0; i < table.num_pinned; ++i) {
    const int64_t row = table.pinned[i];
    if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(table.size)) continue;
    uint64_t& word = work.pinned[row / kRowsOfWord];
    const uint64_t bit = uint64_t{1} << (row % kRowsOfWord);
    work.stays[n] = static_cast<int32_t>(row);
    n += (word & bit) == 0;  // a branch could not be predicted
    word |= bit;
    if (n == table.size) break;
  }
  return n;
}

struct Range {
  int64_t least, most;
};

// Writes each row's order, and returns the range of the orders. The loops here and below visit all
// rows without a branch, so that compilers vectorize them. This matters because a sweep of a small
// table reads every score to drop a few hundred rows.
Range order_rows(const ScoredRows& table, const Work& work, const ParallelFor& parallel_for) {
  constexpr Range kNone{std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  std::atomic<int64_t> least{kNone.least}, most{kNone.most};
  parallel_for(0, table.size, kRows, [&](int64_t begin, int64_t end) {
    const LfuClock clock = table.clock();
    int64_t* const orders = work.orders;
    Range own = kNone;
    const auto order = [&](const auto& of_row) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t value = of_row(row);
        orders[row] = value;
        own.least = std::min(own.least, value);
        own.most = std::max(own.most, value);
      }
    };
    if (table.policy == ScorePolicy::kLfu) {
      order([&](int64_t row) { return static_cast<int64_t>(clock.age(table.scores[row])); });
    } else {
      order([&](int64_t row) { return table.scores[row]; });
    }
    for (int64_t seen = least; own.least < seen && !least.compare_exchange_weak(seen, own.least);) {
    }
    for (int64_t seen = most; own.most > seen && !most.compare_exchange_weak(seen, own.most);) {
    }
  });
  return {least, most};
}

// The limit on the order of wanted rows, and how many rows of exactly this order are wanted.
struct Limit {
  int64_t order;       // the highest order
  int64_t tied;        // number of rows with this order; 0 if all are taken
  int64_t tied_taken;  // number of these rows to take
};

// Finds the limit with a radix selection. Each round counts the rows by one digit of their order,
// finds the digit value at which the running count reaches `count`, and continues with the rows
// that have this digit.
Limit find_limit(const ScoredRows& table, const Work& work, const Range& orders, int64_t num_pinned,
                 const ParallelFor& parallel_for) {
  if (table.size - num_pinned <= table.count) return {orders.most, 0, 0};
  const auto least = static_cast<uint64_t>(orders.least);
  const uint64_t range = static_cast<uint64_t>(orders.most) - least;
  int64_t missing = table.count;
  uint64_t prefix = 0;  // digits so far
  for (int end = range == 0 ? 1 : 64 - __builtin_clzll(range);;) {
    const int shift = std::max(0, end - kDigitBits);
    const uint64_t mask = (uint64_t{1} << (end - shift)) - 1;
    std::fill_n(work.digits, kDigits, uint32_t{0});
    const auto count = [&](uint32_t* counts, int64_t row, uint32_t by) {
      const uint64_t digits = (static_cast<uint64_t>(work.orders[row]) - least) >> shift;
      counts[digits & mask] += (digits & ~mask) == prefix ? by : 0;
    };
    parallel_for(0, table.size, kRows, [&](int64_t begin, int64_t last) {
      uint32_t own[kDigits] = {};
      for (int64_t row = begin; row < last; ++row) count(own, row, 1);
      for (int d = 0; d < kDigits; ++d) {
        if (own[d] != 0) __atomic_fetch_add(work.digits + d, own[d], __ATOMIC_RELAXED);
      }
    });
    for (int64_t i = 0; i < num_pinned; ++i) count(work.digits, work.stays[i], ~uint32_t{0});
    uint64_t digit = 0;
    for (; missing > work.digits[digit]; ++digit) missing -= work.digits[digit];
    prefix |= digit;
    const int64_t here = work.digits[digit];
    if (here == missing) {  // up to the last order with these digits
      const uint64_t last = prefix << shift | ((uint64_t{1} << shift) - 1);
      return {static_cast<int64_t>(least + std::min(last, range)), 0, 0};
    }
    if (shift == 0) return {static_cast<int64_t>(least + prefix), here, missing};
    end = shift;
    prefix <<= std::min(end, kDigitBits);
  }
}

// Marks and numbers the rows up to the limit, and returns how many there are.
int64_t number_wanted(const ScoredRows& table, const Work& work, int64_t limit,
                      const ParallelFor& parallel_for) {
  parallel_for(0, work.words, kRows / kRowsOfWord, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      const int64_t* const orders = work.orders + w * kRowsOfWord;
      const int64_t rows = std::min(kRowsOfWord, table.size - w * kRowsOfWord);
      uint64_t wanted = 0;
      for (int64_t r = 0; r < rows; ++r) wanted |= uint64_t{orders[r] <= limit} << r;
      work.wanted[w] = wanted & ~work.pinned[w];
    }
  });
  int32_t before = 0;
  for (int64_t w = 0; w < work.words; ++w) {
    work.before[w] = before;
    before += __builtin_popcountll(work.wanted[w]);
  }
  return before;
}

// Reads the keys of the wanted rows and, unless last_keys is null, of the last table.count rows.
void read_keys(const ScoredRows& table, const Work& work, int64_t num_wanted, int64_t* last_keys,
               const ParallelFor& parallel_for) {
  std::fill_n(work.keys, num_wanted, int64_t{0});
  uint64_t* const read = work.read;
  read[table.size / kRowsOfWord] = 0;
  std::copy_n(work.wanted, work.words, read);
  const int64_t last = last_keys == nullptr ? table.size : table.size - table.count;
  if (last_keys != nullptr) std::fill_n(last_keys, table.count, int64_t{0});
  for (int64_t row = last; row < table.size; ++row) {
    read[row / kRowsOfWord] |= uint64_t{1} << (row % kRowsOfWord);
  }
  const auto size = static_cast<uint32_t>(table.size);
  // Treat empty slots (row -1), and rows that only a damaged table has, as row `size`, whose key is
  // not read. Most buckets have no key to read, so one branch per bucket is predicted well.
  const auto bit_of = [=](int32_t row) {
    const uint32_t r = std::min(static_cast<uint32_t>(row), size);
    return read[r / kRowsOfWord] >> (r % kRowsOfWord) & 1;
  };
  parallel_for(0, table.num_buckets, kBuckets, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const Bucket& bucket = table.buckets[b];
      uint64_t any = 0;
      for (const int32_t row : bucket.rows) any |= bit_of(row);
      if (any == 0) continue;
      for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
        const int64_t row = bucket.rows[slot];
        if (bit_of(bucket.rows[slot]) == 0) continue;
        // Stores are relaxed, since in a damaged table two slots may have the same row.
        const int64_t key = bucket.keys[slot];
        if (row >= last) __atomic_store_n(last_keys + (row - last), key, __ATOMIC_RELAXED);
        if (!has(work.wanted, row)) continue;
        const int64_t w = row / kRowsOfWord;
        const uint64_t below = work.wanted[w] & ((uint64_t{1} << (row % kRowsOfWord)) - 1);
        __atomic_store_n(work.keys + work.before[w] + __builtin_popcountll(below), key,
                         __ATOMIC_RELAXED);
      }
    }
  });
}

}  // namespace

int64_t lowest_rows_workspace_bytes(int64_t size) {
  return Arena::bytes_of<Work>(size);
}

int64_t lowest_rows(const ScoredRows& table, const LowestRows& found, void* workspace,
                    const ParallelFor& parallel_for) {
  if (table.count <= 0) return 0;
  Arena arena(workspace);
  const Work work(arena, table.size);
  const int64_t num_pinned = list_pinned(table, work);
  if (num_pinned == table.size) return 0;
  const Range orders = order_rows(table, work, parallel_for);
  const Limit limit = find_limit(table, work, orders, num_pinned, parallel_for);
  const int64_t num_wanted = number_wanted(table, work, limit.order, parallel_for);
  read_keys(table, work, num_wanted, found.last_keys, parallel_for);

  const auto each_wanted = [&](const auto& use) {
    int64_t number = 0;
    for (int64_t w = 0; w < work.words; ++w) {
      for (uint64_t word = work.wanted[w]; word != 0; word &= word - 1) {
        use(w * kRowsOfWord + __builtin_ctzll(word), number++);
      }
    }
  };
  uint64_t* const lost = work.lost;
  std::fill_n(lost, work.words, uint64_t{0});
  if (limit.tied > 0) {
    int32_t* end = work.tied;
    each_wanted([&](int64_t row, int64_t number) {
      if (work.orders[row] == limit.order) *end++ = static_cast<int32_t>(number);
    });
    int32_t* const first_lost = work.tied + limit.tied_taken;
    std::nth_element(work.tied, first_lost, end, [&](int32_t a, int32_t b) {
      const uint64_t hash_a = hash_key(work.keys[a]), hash_b = hash_key(work.keys[b]);
      return hash_a != hash_b ? hash_a < hash_b : a < b;
    });
    for (const int32_t* number = first_lost; number < end; ++number) {
      lost[*number / kRowsOfWord] |= uint64_t{1} << (*number % kRowsOfWord);
    }
  }
  int64_t n = 0;
  each_wanted([&](int64_t row, int64_t number) {
    if (has(lost, number)) return;
    found.rows[n] = row;
    found.orders[n] = work.orders[row];
    found.keys[n++] = work.keys[number];
  });
  return n;
}

}  // namespace sparsekit::cpu
