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
// Minimum number of words of bits per thread, and of buckets.
constexpr int64_t kWords = 512;
constexpr int64_t kBuckets = 2048;

bool has(const uint64_t* bits, int64_t i) {
  return (bits[i / kRowsOfWord] >> (i % kRowsOfWord) & 1) != 0;
}

// Calls use(i) for each bit that is set in word w, in ascending order.
template <class Use>
void each_bit(uint64_t word, int64_t w, const Use& use) {
  for (; word != 0; word &= word - 1) use(w * kRowsOfWord + __builtin_ctzll(word));
}

struct Work {
  int64_t words;
  int64_t* orders;   // [size]
  uint64_t* pinned;  // [words] a bit for each row
  uint64_t* wanted;  // [words] a bit for each row that may be among the results
  int32_t* before;   // [words] number of wanted rows in earlier words
  int64_t* keys;     // [size] keys of the wanted rows, in order of row
  int32_t* tied;     // [size] numbers of the wanted rows of the highest order
  uint32_t* digits;  // [kDigits]

  Work(Arena& arena, int64_t size)
      : words((size + kRowsOfWord - 1) / kRowsOfWord),
        orders(arena.take<int64_t>(size)),
        pinned(arena.take<uint64_t>(words)),
        wanted(arena.take<uint64_t>(words)),
        before(arena.take<int32_t>(words)),
        keys(arena.take<int64_t>(size)),
        tied(arena.take<int32_t>(size)),
        digits(arena.take<uint32_t>(kDigits)) {}

  // Returns the rows of word w that are not pinned.
  uint64_t free_rows(int64_t w, int64_t size) const {
    const int64_t rows = std::min(size - w * kRowsOfWord, kRowsOfWord);
    return ~pinned[w] & ~uint64_t{0} >> (kRowsOfWord - rows);
  }
};

void mark_pinned(const ScoredRows& table, const Work& work, const ParallelFor& parallel_for) {
  std::fill_n(work.pinned, work.words, uint64_t{0});
  parallel_for(0, table.num_pinned, kWords * kRowsOfWord, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = table.pinned[i];
      if (static_cast<uint64_t>(row) >= static_cast<uint64_t>(table.size)) continue;
      __atomic_fetch_or(work.pinned + row / kRowsOfWord, uint64_t{1} << (row % kRowsOfWord),
                        __ATOMIC_RELAXED);
    }
  });
}

// The rows that are not pinned.
struct FreeRows {
  int64_t count;
  int64_t least, most;  // orders
};

FreeRows order_rows(const ScoredRows& table, const Work& work, const ParallelFor& parallel_for) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> count{0}, least{kMost}, most{kLeast};
  parallel_for(0, work.words, kWords, [&](int64_t begin, int64_t end) {
    const LfuClock clock = table.clock();
    FreeRows own{0, kMost, kLeast};
    for (int64_t w = begin; w < end; ++w) {
      const uint64_t free = work.free_rows(w, table.size);
      own.count += __builtin_popcountll(free);
      each_bit(free, w, [&](int64_t row) {
        const int64_t order = table.order(clock, row);
        work.orders[row] = order;
        own.least = std::min(own.least, order);
        own.most = std::max(own.most, order);
      });
    }
    count += own.count;
    for (int64_t seen = least; own.least < seen && !least.compare_exchange_weak(seen, own.least);) {
    }
    for (int64_t seen = most; own.most > seen && !most.compare_exchange_weak(seen, own.most);) {
    }
  });
  return {count, least, most};
}

// Where the wanted rows end.
struct Limit {
  int64_t order;       // the highest order
  int64_t tied;        // number of rows of this order; 0 if all of them are taken
  int64_t tied_taken;  // number of those that are taken
};

// Finds the limit by a radix selection. Each round counts the rows by one digit of their order, and
// goes on with the rows that have the digit at which `count` is reached.
Limit find_limit(const ScoredRows& table, const Work& work, const FreeRows& free,
                 const ParallelFor& parallel_for) {
  if (free.count <= table.count) return {free.most, 0, 0};
  const auto least = static_cast<uint64_t>(free.least);
  const uint64_t range = static_cast<uint64_t>(free.most) - least;
  int64_t missing = table.count;
  uint64_t prefix = 0;  // digits so far
  for (int end = range == 0 ? 1 : 64 - __builtin_clzll(range);;) {
    const int shift = std::max(0, end - kDigitBits);
    const uint64_t mask = (uint64_t{1} << (end - shift)) - 1;
    std::fill_n(work.digits, kDigits, uint32_t{0});
    parallel_for(0, work.words, kWords, [&](int64_t begin, int64_t last) {
      uint32_t own[kDigits] = {};
      for (int64_t w = begin; w < last; ++w) {
        each_bit(work.free_rows(w, table.size), w, [&](int64_t row) {
          const uint64_t digits = (static_cast<uint64_t>(work.orders[row]) - least) >> shift;
          own[digits & mask] += (digits & ~mask) == prefix;
        });
      }
      for (int d = 0; d < kDigits; ++d) {
        if (own[d] != 0) __atomic_fetch_add(work.digits + d, own[d], __ATOMIC_RELAXED);
      }
    });
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
  parallel_for(0, work.words, kWords, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) {
      uint64_t wanted = 0;
      each_bit(work.free_rows(w, table.size), w, [&](int64_t row) {
        wanted |= uint64_t{work.orders[row] <= limit} << (row % kRowsOfWord);
      });
      work.wanted[w] = wanted;
    }
  });
  int32_t before = 0;
  for (int64_t w = 0; w < work.words; ++w) {
    work.before[w] = before;
    before += __builtin_popcountll(work.wanted[w]);
  }
  return before;
}

void read_keys(const ScoredRows& table, const Work& work, int64_t num_wanted,
               const ParallelFor& parallel_for) {
  std::fill_n(work.keys, num_wanted, int64_t{0});
  parallel_for(0, table.num_buckets, kBuckets, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
        const int64_t row = table.buckets[b].rows[slot];
        if (row < 0 || row >= table.size || !has(work.wanted, row)) continue;
        const int64_t w = row / kRowsOfWord;
        const uint64_t below = work.wanted[w] & ((uint64_t{1} << (row % kRowsOfWord)) - 1);
        // Relaxed, since in a damaged table two slots may have the same row.
        __atomic_store_n(work.keys + work.before[w] + __builtin_popcountll(below),
                         table.buckets[b].keys[slot], __ATOMIC_RELAXED);
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
  mark_pinned(table, work, parallel_for);
  const FreeRows free = order_rows(table, work, parallel_for);
  if (free.count == 0) return 0;
  const Limit limit = find_limit(table, work, free, parallel_for);
  const int64_t num_wanted = number_wanted(table, work, limit.order, parallel_for);
  read_keys(table, work, num_wanted, parallel_for);

  const auto each_wanted = [&](const auto& use) {
    int64_t number = 0;
    for (int64_t w = 0; w < work.words; ++w) {
      each_bit(work.wanted[w], w, [&](int64_t row) { use(row, number++); });
    }
  };
  uint64_t* const lost = work.pinned;  // a bit for each wanted row; the pinned rows are left out
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
