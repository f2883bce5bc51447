#include "sparsekit/hash_table.h"

#include <algorithm>
#include <atomic>

#include "cpu/first_bad.h"
#include "cpu/probe.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 2048;

// Number of keys in flight: enough to hide the latency of a memory access, but few enough for the
// line-fill buffers.
constexpr int kBlock = 16;

// Calls use(position, count, homes, next_homes) for blocks of the keys [begin, end), until a call
// returns false. `homes` are the home buckets of the block. `next_homes` are the home buckets of
// the next kBlock keys; `use` must prefetch them one by one as it proceeds. Home buckets are
// computed for a whole block, so that the compiler can vectorize the loop.
template <class Key, class Use>
void each_block(const Bucket* buckets, int64_t num_buckets, int64_t seed, const Key* keys,
                int64_t begin, int64_t end, Use&& use) {
  const Bucket* homes[2][kBlock];
  std::fill(homes[0], homes[0] + 2 * kBlock, buckets);
  const auto locate = [=](int64_t from, const Bucket** to) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
    uint64_t hashes[kBlock];
    for (int k = 0; k < count; ++k) hashes[k] = hash_key(keys[from + k] ^ seed);
    for (int k = 0; k < count; ++k) to[k] = buckets + bucket_of_hash(hashes[k], num_buckets);
  };
  locate(begin, homes[0]);
  for (int k = 0; k < kBlock; ++k) prefetch(homes[0][k]);
  int now = 0;
  for (int64_t from = begin; from < end; from += kBlock, now = 1 - now) {
    locate(from + kBlock, homes[1 - now]);
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
    if (!use(from, count, homes[now], homes[1 - now])) return;
  }
}

// Searches only the home buckets of a block of keys. Returns a bit mask of the keys that were not
// found there; the rows of these keys are undefined. Key 0 matches an empty slot, whose row is -1,
// so a negative row counts as not found. Does not branch on the result of a comparison, since the
// branch would be mispredicted.
template <class Key, class Row>
uint64_t find_at_home(const Bucket* const* homes, const Bucket* const* next_homes, const Key* keys,
                      int count, Row* rows) {
  uint64_t missing = 0;
  for (int k = 0; k < count; ++k) {
    prefetch(next_homes[k]);
    const uint32_t slots = match_slots(*homes[k], keys[k]);
    rows[k] = homes[k]->rows[__builtin_ctz(slots | 1u << (kSlotsPerBucket - 1))];
    missing |= static_cast<uint64_t>((slots == 0) | (rows[k] < 0)) << k;
  }
  return missing;
}

template <class Key, class Row>
void find_range(const Bucket* buckets, int64_t num_buckets, int64_t seed, const Key* keys,
                int64_t begin, int64_t end, Row* rows) {
  // Positions of keys that may be in a bucket after their home bucket. These keys are resolved in
  // batches: all their next buckets are prefetched before the first one is read.
  int64_t pending[2 * kBlock];
  int64_t next[2 * kBlock];
  int num_pending = 0;
  const auto resolve = [&] {
    for (int p = 0; p < num_pending; ++p) {
      rows[pending[p]] =
          static_cast<Row>(find_from(buckets, num_buckets, next[p], keys[pending[p]]));
    }
    num_pending = 0;
  };
  each_block(
      buckets, num_buckets, seed, keys, begin, end,
      [&](int64_t from, int count, const Bucket* const* homes, const Bucket* const* next_homes) {
        uint64_t missing = find_at_home(homes, next_homes, keys + from, count, rows + from);
        for (; missing != 0; missing &= missing - 1) {
          const int k = __builtin_ctzll(missing);
          rows[from + k] = -1;
          if (!homes[k]->passed()) continue;
          pending[num_pending] = from + k;
          next[num_pending] = next_bucket(homes[k] - buckets, num_buckets);
          prefetch(&buckets[next[num_pending++]]);
        }
        if (num_pending > kBlock) resolve();
        return true;
      });
  resolve();
}

enum class Inserted { kAll, kFull, kDamaged };

struct Table {
  Bucket* buckets;
  int64_t num_buckets;
  int64_t seed;
  int64_t size;
  int64_t capacity;
};

// Finds or inserts a key that an earlier lookup did not find. An earlier entry of the same call may
// have inserted it since then.
inline Inserted find_or_insert_key(Table& table, int64_t home, int64_t key, int64_t* row) {
  *row = find_from(table.buckets, table.num_buckets, home, key);
  if (*row >= 0) return Inserted::kAll;
  if (table.size >= table.capacity) return Inserted::kFull;
  const auto next_row = static_cast<int32_t>(table.size);
  if (!insert_absent(table.buckets, table.num_buckets, home, key, next_row)) {
    return Inserted::kDamaged;
  }
  *row = table.size++;
  return Inserted::kAll;
}

// Finds or inserts the keys from *position to end, in order. *position becomes the position of the
// first key that does not fit, or `end`.
template <class Key>
Inserted insert_range(Table& table, const Key* keys, int64_t end, int64_t* rows,
                      int64_t* position) {
  Inserted inserted = Inserted::kAll;
  const auto use = [&](int64_t from, int count, const Bucket* const* homes,
                       const Bucket* const* next_homes) {
    uint64_t missing = find_at_home(homes, next_homes, keys + from, count, rows + from);
    for (uint64_t rest = missing; rest != 0; rest &= rest - 1) {
      const Bucket* home = homes[__builtin_ctzll(rest)];
      if (home->passed()) {
        prefetch(&table.buckets[next_bucket(home - table.buckets, table.num_buckets)]);
      }
    }
    for (; missing != 0; missing &= missing - 1) {
      const int k = __builtin_ctzll(missing);
      *position = from + k;
      inserted =
          find_or_insert_key(table, homes[k] - table.buckets, keys[from + k], &rows[from + k]);
      if (inserted != Inserted::kAll) return false;
    }
    return true;
  };
  each_block(table.buckets, table.num_buckets, table.seed, keys, *position, end, use);
  if (inserted == Inserted::kAll) *position = end;
  return inserted;
}

// Like insert_range, for keys that have already been looked up: visits only keys whose row is -1.
template <class Key>
Inserted insert_missing(Table& table, const Key* keys, int64_t end, int64_t* rows,
                        int64_t* position) {
  for (int64_t& i = *position; i < end; ++i) {
    if (i + kBlock < end && rows[i + kBlock] < 0) {
      prefetch(&table.buckets[home_bucket(keys[i + kBlock], table.seed, table.num_buckets)]);
    }
    if (rows[i] >= 0) continue;
    const int64_t home = home_bucket(keys[i], table.seed, table.num_buckets);
    const Inserted inserted = find_or_insert_key(table, home, keys[i], &rows[i]);
    if (inserted != Inserted::kAll) return inserted;
  }
  return Inserted::kAll;
}

// Removes a key. Decrements the `spilled` count of each bucket that the key was moved past.
void erase(const Table& table, int64_t key, int64_t row) {
  int64_t b = home_bucket(key, table.seed, table.num_buckets);
  for (int64_t step = 0; step < table.num_buckets; ++step) {
    Bucket& bucket = table.buckets[b];
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      if (bucket.rows[slot] == row && bucket.keys[slot] == key) {
        bucket.keys[slot] = 0;
        bucket.rows[slot] = -1;
        return;
      }
    }
    --bucket.spilled;
    b = next_bucket(b, table.num_buckets);
  }
  // The key was not found: another thread has written to `keys` or to the table. Undo all
  // decrements.
  for (int64_t i = 0; i < table.num_buckets; ++i) ++table.buckets[i].spilled;
}

// Removes the keys that this call inserted, newest first. This restores the table to its previous
// state.
template <class Key>
void take_back(Table& table, int64_t size_before, const Key* keys, int64_t end,
               const int64_t* rows) {
  for (int64_t i = end - 1; i >= 0 && table.size > size_before; --i) {
    if (rows[i] == table.size - 1) erase(table, keys[i], --table.size);
  }
}

// Renumbers and removes the keys of bucket `b`. Other threads may be decrementing its `spilled`
// count, but have no access to its slots.
void renumber_bucket(Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t b,
                     const int32_t* new_rows, int64_t n) {
  Bucket& bucket = buckets[b];
  int32_t rows[kSlotsPerBucket];
  bool differs = false;
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
    const int32_t row = bucket.rows[slot];
    // Do not branch on empty slots: the branch could not be predicted.
    const bool in_use = static_cast<uint64_t>(row) < static_cast<uint64_t>(n);
    const int32_t new_row = new_rows[in_use ? row : 0];
    rows[slot] = in_use ? new_row : row;
    differs |= rows[slot] != row;
  }
  if (!differs) return;  // do not write to a cache line that is unchanged
  int used = 0;
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
    const int64_t key = bucket.keys[slot];
    if (rows[slot] >= 0) {
      if (used < slot) bucket.keys[used] = key;
      bucket.rows[used++] = rows[slot];
    } else if (bucket.rows[slot] >= 0) {
      const int64_t home = home_bucket(key, seed, num_buckets);
      for (int64_t passed = home; passed != b; passed = next_bucket(passed, num_buckets)) {
        __atomic_fetch_sub(&buckets[passed].spilled, 1, __ATOMIC_RELAXED);
      }
    }
  }
  std::fill(bucket.keys + used, bucket.keys + kSlotsPerBucket, int64_t{0});
  std::fill(bucket.rows + used, bucket.rows + kSlotsPerBucket, int32_t{-1});
}

}  // namespace

void hash_table_clear(Bucket* buckets, int64_t num_buckets, const ParallelFor& parallel_for) {
  parallel_for(0, num_buckets, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      buckets[b] = Bucket{{0, 0, 0, 0, 0}, {-1, -1, -1, -1, -1}, 0};
    }
  });
}

template <class Key, class Row>
void hash_table_find(const Bucket* buckets, int64_t num_buckets, int64_t seed, const Key* keys,
                     int64_t n, Row* rows, const ParallelFor& parallel_for) {
  parallel_for(0, n, kGrain, [=](int64_t begin, int64_t end) {
    find_range(buckets, num_buckets, seed, keys, begin, end, rows);
  });
}

template <class Key>
int64_t hash_table_find_or_insert(Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t* size,
                                  int64_t capacity, const Key* keys, int64_t n, int64_t* rows,
                                  const ParallelFor& parallel_for) {
  const int64_t size_before = *size;
  Table table{buckets, num_buckets, seed, size_before, capacity};
  int64_t position = 0;
  Inserted inserted = insert_range(table, keys, std::min(n, kGrain), rows, &position);
  // Only one thread inserts. If few of the keys so far were new, let all threads look up the
  // remaining keys first, so that few keys are left for this thread. If many were new, such a
  // lookup would only double the work.
  if (inserted == Inserted::kAll && position < n) {
    if (parallel_for.num_threads() > 1 && table.size - size_before < kGrain / 2) {
      hash_table_find(buckets, num_buckets, seed, keys + position, n - position, rows + position,
                      parallel_for);
      inserted = insert_missing(table, keys, n, rows, &position);
    } else {
      inserted = insert_range(table, keys, n, rows, &position);
    }
  }
  if (inserted == Inserted::kAll) {
    *size = table.size;
    return 0;
  }

  take_back(table, size_before, keys, position, rows);
  if (inserted == Inserted::kDamaged) return -1;
  hash_table_find(buckets, num_buckets, seed, keys, n, rows, parallel_for);
  int64_t refused = 0;
  for (int64_t i = 0; i < n; ++i) refused += rows[i] < 0;
  return refused;
}

bool hash_table_keys(const Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t size,
                     int64_t* keys, int64_t* rows, const ParallelFor& parallel_for) {
  parallel_for(0, size, kGrain, [=](int64_t begin, int64_t end) {
    std::fill(keys + begin, keys + end, int64_t{0});
  });
  // Sum of the `spilled` counts of all buckets, minus the number of full buckets that each key was
  // moved past on insertion, summed over keys. In an undamaged table the difference is 0.
  std::atomic<int64_t> surplus{0};
  std::atomic<bool> sound{true};
  parallel_for(0, num_buckets, kGrain, [&](int64_t begin, int64_t end) {
    int64_t own = 0;
    for (int64_t b = begin; b < end; ++b) {
      const Bucket& bucket = buckets[b];
      for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
        const int32_t row = bucket.rows[slot];
        if (row < 0 || row >= size) continue;
        keys[row] = bucket.keys[slot];
        own -= buckets_passed(b, bucket.keys[slot], seed, num_buckets);
      }
      own += bucket.spilled;
      if (bucket.spilled < 0) sound = false;
    }
    surplus += own;
  });
  if (!sound || surplus != 0) return false;  // wrong counts could make searches very long
  // Check that looking up each row's key returns that row. If a row has no key, or two keys, the
  // check fails for some row.
  hash_table_find(buckets, num_buckets, seed, keys, size, rows, parallel_for);
  parallel_for(0, size, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (rows[row] != row) sound = false;
    }
  });
  return sound;
}

bool hash_table_copy(const Bucket* from, int64_t num_from, int64_t seed, int64_t rows, Bucket* to,
                     int64_t num_to) {
  for (const Bucket* bucket = from; bucket < from + num_from; ++bucket) {
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      const int32_t row = bucket->rows[slot];
      if (row < 0 || row >= rows) continue;
      const int64_t key = bucket->keys[slot];
      if (!insert_absent(to, num_to, home_bucket(key, seed, num_to), key, row)) return false;
    }
  }
  return true;
}

int64_t hash_table_renumber(Bucket* buckets, int64_t num_buckets, int64_t seed,
                            const int32_t* new_rows, int64_t n, const ParallelFor& parallel_for) {
  const auto is_bad = [n](int32_t row) { return row < -1 || row >= n; };
  FirstBad bad;
  parallel_for(0, n, kGrain, [=, &bad](int64_t begin, int64_t end) {
    bool any = false;  // look for the position only if needed, so that this loop is vectorized
    for (int64_t i = begin; i < end; ++i) any |= is_bad(new_rows[i]);
    if (any) bad.report(std::find_if(new_rows + begin, new_rows + end, is_bad) - new_rows);
  });
  if (bad.position() >= 0) return bad.position();
  if (n == 0) return -1;
  parallel_for(0, num_buckets, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      renumber_bucket(buckets, num_buckets, seed, b, new_rows, n);
    }
  });
  return -1;
}

template decltype(hash_table_find<int32_t, int32_t>) hash_table_find<int32_t, int32_t>;
template decltype(hash_table_find<int32_t, int64_t>) hash_table_find<int32_t, int64_t>;
template decltype(hash_table_find<int64_t, int32_t>) hash_table_find<int64_t, int32_t>;
template decltype(hash_table_find<int64_t, int64_t>) hash_table_find<int64_t, int64_t>;
template decltype(hash_table_find_or_insert<int32_t>) hash_table_find_or_insert<int32_t>;
template decltype(hash_table_find_or_insert<int64_t>) hash_table_find_or_insert<int64_t>;

}  // namespace sparsekit::cpu
