#include "sparsekit/hash_table.h"

#include <algorithm>
#include <atomic>

#include "cpu/probe.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 2048;

#ifndef KB
#define KB 32
#endif
// Keys in flight: enough to cover a memory access, few enough for the line-fill buffers.
constexpr int kBlock = KB;

// Calls use(position, count, homes, next_homes) for blocks of the keys from begin to end, until it
// returns false: home buckets of the block, and of the kBlock keys after it, for which it is to ask
// one by one as it goes. Homes are computed by blocks, since that can be done for several at a time.
template <class Key, class Use>
void each_block(const Bucket* buckets, int64_t num_buckets, const Key* keys, int64_t begin,
                int64_t end, Use&& use) {
  int64_t homes[2][kBlock] = {};
  const auto locate = [=](int64_t from, int64_t* to) {
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
    uint64_t hashes[kBlock];
    for (int k = 0; k < count; ++k) hashes[k] = hash_key(keys[from + k]);
    for (int k = 0; k < count; ++k) to[k] = bucket_of_hash(hashes[k], num_buckets);
  };
  locate(begin, homes[0]);
  for (int k = 0; k < kBlock; ++k) prefetch(&buckets[homes[0][k]]);
  int now = 0;
  for (int64_t from = begin; from < end; from += kBlock, now = 1 - now) {
    locate(from + kBlock, homes[1 - now]);
    const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
    if (!use(from, count, homes[now], homes[1 - now])) return;
  }
}

// Looks only into the home buckets of a block of keys. Lists in open [kBlock] the keys that may be
// further on, and with `absent_too` all that are not here; returns how many. No branch depends on
// what is found, since none could be predicted.
template <bool absent_too, class Key>
int find_at_home(const Bucket* buckets, const int64_t* homes, const int64_t* next_homes,
                 const Key* keys, int count, int64_t* rows, int* open) {
  int num_open = 0;
  for (int k = 0; k < count; ++k) {
    prefetch(&buckets[next_homes[k]]);
    const Bucket& bucket = buckets[homes[k]];
    const uint32_t slots = match_slots(bucket, keys[k]);
    const int64_t none = -static_cast<int64_t>(slots == 0);
    rows[k] = bucket.rows[__builtin_ctz(slots | 1u << (kSlotsPerBucket - 1))] | none;
    open[num_open] = k;
    num_open += absent_too ? rows[k] < 0 : (slots == 0) & (bucket.spilled != 0);
  }
  return num_open;
}

template <class Key>
void find_range(const Bucket* buckets, int64_t num_buckets, const Key* keys, int64_t begin,
                int64_t end, int64_t* rows) {
  // Keys that may be behind their home bucket. They are resolved once there are enough to ask for
  // all their next lines before the first is read.
  int64_t pending[2 * kBlock];
  int64_t next[2 * kBlock];
  int num_pending = 0;
  const auto resolve = [&] {
    for (int p = 0; p < num_pending; ++p) {
      rows[pending[p]] = find_from(buckets, num_buckets, next[p], keys[pending[p]]);
    }
    num_pending = 0;
  };
  each_block(buckets, num_buckets, keys, begin, end,
             [&](int64_t from, int count, const int64_t* homes, const int64_t* next_homes) {
               int open[kBlock];
               const int num_open =
                   find_at_home<false>(buckets, homes, next_homes, keys + from, count, rows + from, open);
               for (int k = 0; k < num_open; ++k, ++num_pending) {
                 pending[num_pending] = from + open[k];
                 next[num_pending] = next_bucket(homes[open[k]], num_buckets);
                 prefetch(&buckets[next[num_pending]]);
               }
               if (num_pending > kBlock) resolve();
               return true;
             });
  resolve();
}

enum class Inserted { kAll, kFull, kDamaged };

// Finds or inserts in order the keys from begin to end, up to the first for which there is no room.
// *position becomes its position, else `end`.
template <class Key>
Inserted insert_range(Bucket* buckets, int64_t num_buckets, int64_t* size, int64_t capacity,
                      const Key* keys, int64_t begin, int64_t end, int64_t* rows,
                      int64_t* position) {
  Inserted inserted = Inserted::kAll;
  *position = end;
  each_block(
      buckets, num_buckets, keys, begin, end, [&](int64_t from, int count, const int64_t* homes, const int64_t* next_homes) {
        int open[kBlock];
        const int num_open =
            find_at_home<true>(buckets, homes, next_homes, keys + from, count, rows + from, open);
        for (int k = 0; k < num_open; ++k) {
          const int64_t home = homes[open[k]];
          if (buckets[home].spilled != 0) prefetch(&buckets[next_bucket(home, num_buckets)]);
        }
        for (int k = 0; k < num_open; ++k) {
          const int64_t i = from + open[k];
          const int64_t home = homes[open[k]];
          // It may have come in since it was looked up, as an earlier entry of this block.
          rows[i] = find_from(buckets, num_buckets, home, keys[i]);
          if (rows[i] >= 0) continue;
          const auto row = static_cast<int32_t>(*size);
          if (*size >= capacity) {
            inserted = Inserted::kFull;
          } else if (!insert_absent(buckets, num_buckets, home, keys[i], row)) {
            inserted = Inserted::kDamaged;
          } else {
            rows[i] = row;
            ++*size;
            continue;
          }
          *position = i;
          return false;
        }
        return true;
      });
  return inserted;
}

// Takes a key out and the marks it left on full buckets.
void erase(Bucket* buckets, int64_t num_buckets, int64_t key, int64_t row) {
  for (int64_t b = home_bucket(key, num_buckets);; b = next_bucket(b, num_buckets)) {
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      if (buckets[b].rows[slot] == row && buckets[b].keys[slot] == key) {
        buckets[b].keys[slot] = 0;
        buckets[b].rows[slot] = -1;
        return;
      }
    }
    --buckets[b].spilled;
  }
}

// Takes out what this call inserted, the newest first, so that what remains is the table as it was.
template <class Key>
void take_back(Bucket* buckets, int64_t num_buckets, int64_t* size, int64_t size_before,
               const Key* keys, int64_t end, const int64_t* rows) {
  for (int64_t i = end - 1; *size > size_before; --i) {
    if (rows[i] == *size - 1) erase(buckets, num_buckets, keys[i], --*size);
  }
}

}  // namespace

void hash_table_clear(Bucket* buckets, int64_t num_buckets, const ParallelFor& parallel_for) {
  parallel_for(0, num_buckets, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      buckets[b] = Bucket{{0, 0, 0, 0, 0}, {-1, -1, -1, -1, -1}, 0};
    }
  });
}

template <class Key>
void hash_table_find(const Bucket* buckets, int64_t num_buckets, const Key* keys, int64_t n,
                     int64_t* rows, const ParallelFor& parallel_for) {
  parallel_for(0, n, kGrain, [=](int64_t begin, int64_t end) {
    find_range(buckets, num_buckets, keys, begin, end, rows);
  });
}

template <class Key>
int64_t hash_table_find_or_insert(Bucket* buckets, int64_t num_buckets, int64_t* size,
                                  int64_t capacity, const Key* keys, int64_t n, int64_t* rows,
                                  const ParallelFor& parallel_for) {
  const int64_t size_before = *size;
  int64_t position = 0;
  const Inserted inserted = insert_range(buckets, num_buckets, size, capacity, keys, 0, n, rows, &position);
  if (inserted == Inserted::kAll) return 0;

  take_back(buckets, num_buckets, size, size_before, keys, position, rows);
  if (inserted == Inserted::kDamaged) return -1;
  hash_table_find(buckets, num_buckets, keys, n, rows, parallel_for);
  int64_t refused = 0;
  for (int64_t i = 0; i < n; ++i) refused += rows[i] < 0;
  return refused;
}

bool hash_table_keys(const Bucket* buckets, int64_t num_buckets, int64_t size, int64_t* keys,
                     int64_t* rows, const ParallelFor& parallel_for) {
  parallel_for(0, size, kGrain, [=](int64_t begin, int64_t end) {
    std::fill(keys + begin, keys + end, int64_t{0});
  });
  parallel_for(0, num_buckets, kGrain, [=](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
        const int32_t row = buckets[b].rows[slot];
        if (row >= 0 && row < size) keys[row] = buckets[b].keys[slot];
      }
    }
  });
  // A row that no key has, or that two have, does not find itself.
  hash_table_find(buckets, num_buckets, keys, size, rows, parallel_for);
  std::atomic<bool> sound{true};
  parallel_for(0, size, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (rows[row] != row) sound = false;
    }
  });
  return sound;
}

#define SPARSEKIT_INSTANTIATE(Key)                                                            \
  template void hash_table_find(const Bucket*, int64_t, const Key*, int64_t, int64_t*,        \
                                const ParallelFor&);                                          \
  template int64_t hash_table_find_or_insert(Bucket*, int64_t, int64_t*, int64_t, const Key*, \
                                             int64_t, int64_t*, const ParallelFor&);
SPARSEKIT_INSTANTIATE(int32_t)
SPARSEKIT_INSTANTIATE(int64_t)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
