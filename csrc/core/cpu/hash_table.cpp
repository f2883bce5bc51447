#include "sparsekit/hash_table.h"

#include <algorithm>
#include <atomic>

#include "cpu/probe.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 2048;

// Keys whose home bucket was full and which may be further on. They are resolved in a second,
// prefetched round, since their next line was not asked for in the first.
struct Pending {
  int count = 0;
  int64_t index[kInFlight];
  int64_t bucket[kInFlight];
};

template <class Key>
void resolve(const Bucket* buckets, int64_t num_buckets, const Key* keys, int64_t* rows,
             Pending* pending) {
  for (int i = 0; i < pending->count; ++i) {
    const int64_t index = pending->index[i];
    rows[index] = find_from(buckets, num_buckets, pending->bucket[i], keys[index]);
  }
  pending->count = 0;
}

template <class Key>
void find_range(const Bucket* buckets, int64_t num_buckets, const Key* keys, int64_t begin,
                int64_t end, int64_t* rows) {
  int64_t home[kInFlight];
  const auto request = [&](int64_t i) {
    const int64_t bucket = home_bucket(keys[i], num_buckets);
    prefetch(&buckets[bucket]);
    home[i % kInFlight] = bucket;
  };
  const int64_t warm = std::min<int64_t>(end, begin + kInFlight);
  for (int64_t i = begin; i < warm; ++i) request(i);

  Pending pending;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t bucket = home[i % kInFlight];
    if (i + kInFlight < end) request(i + kInFlight);
    if (probe_bucket(buckets[bucket], keys[i], &rows[i]) == Probe::kMoveOn) {
      const int64_t next = next_bucket(bucket, num_buckets);
      prefetch(&buckets[next]);
      pending.index[pending.count] = i;
      pending.bucket[pending.count] = next;
      if (++pending.count == kInFlight) resolve(buckets, num_buckets, keys, rows, &pending);
    }
  }
  resolve(buckets, num_buckets, keys, rows, &pending);
}

enum class Inserted { kAll, kFull, kDamaged };

// Inserts in order the keys that find left at -1, up to the first for which there is no room.
template <class Key>
Inserted insert_missing(Bucket* buckets, int64_t num_buckets, int64_t* size, int64_t capacity,
                        const Key* keys, int64_t n, int64_t* rows) {
  for (int64_t i = 0; i < n; ++i) {
    if (i + kInFlight < n && rows[i + kInFlight] < 0) {
      prefetch(&buckets[home_bucket(keys[i + kInFlight], num_buckets)]);
    }
    if (rows[i] >= 0) continue;
    const int64_t home = home_bucket(keys[i], num_buckets);
    // It may have come in since the find, as an earlier entry of this call.
    rows[i] = find_from(buckets, num_buckets, home, keys[i]);
    if (rows[i] >= 0) continue;
    if (*size >= capacity) return Inserted::kFull;
    const auto row = static_cast<int32_t>(*size);
    if (!insert_absent(buckets, num_buckets, home, keys[i], row)) return Inserted::kDamaged;
    rows[i] = row;
    ++*size;
  }
  return Inserted::kAll;
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
  hash_table_find(buckets, num_buckets, keys, n, rows, parallel_for);
  const int64_t size_before = *size;
  const Inserted inserted = insert_missing(buckets, num_buckets, size, capacity, keys, n, rows);
  if (inserted == Inserted::kAll) return 0;

  take_back(buckets, num_buckets, size, size_before, keys, n, rows);
  if (inserted == Inserted::kDamaged) return -1;
  int64_t refused = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (rows[i] >= size_before) rows[i] = -1;
    refused += rows[i] < 0;
  }
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
