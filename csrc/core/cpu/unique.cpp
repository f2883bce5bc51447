#include "sparsekit/unique.h"

#include <algorithm>

#include "cpu/probe.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cpu {
namespace {

// Buckets of the scratch table: 3 of 5 slots used when all keys are distinct.
int64_t scratch_buckets(int64_t n) {
  return n / 3 + 1;
}

}  // namespace

int64_t unique_workspace_bytes(int64_t n) {
  return scratch_buckets(n) * static_cast<int64_t>(sizeof(Bucket));
}

// A table whose rows are the positions in unique_keys.
template <class Key>
int64_t unique(const Key* keys, int64_t n, Key* unique_keys, int64_t* inverse, int64_t* counts,
               void* workspace, const ParallelFor& parallel_for) {
  auto* buckets = static_cast<Bucket*>(workspace);
  const int64_t num_buckets = scratch_buckets(n);
  hash_table_clear(buckets, num_buckets, parallel_for);

  int64_t home[kInFlight];
  const auto request = [&](int64_t i) {
    const int64_t bucket = home_bucket(keys[i], num_buckets);
    prefetch(&buckets[bucket]);
    home[i % kInFlight] = bucket;
  };
  for (int64_t i = 0; i < std::min<int64_t>(n, kInFlight); ++i) request(i);

  int64_t num_unique = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bucket = home[i % kInFlight];
    if (i + kInFlight < n) request(i + kInFlight);
    int64_t position = find_from(buckets, num_buckets, bucket, keys[i]);
    if (position < 0) {
      position = num_unique++;
      insert_absent(buckets, num_buckets, bucket, keys[i], static_cast<int32_t>(position));
      unique_keys[position] = keys[i];
      counts[position] = 0;
    }
    inverse[i] = position;
    ++counts[position];
  }
  return num_unique;
}

template int64_t unique(const int32_t*, int64_t, int32_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);
template int64_t unique(const int64_t*, int64_t, int64_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);

}  // namespace sparsekit::cpu
