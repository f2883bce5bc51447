#include "sparsekit/unique.h"

#include <algorithm>

#include "cpu/unique_by_hash.h"
#include "cpu/unique_by_range.h"

namespace sparsekit::cpu {
namespace {

// unique() has two algorithms with the same result. Range-based: each thread numbers a range of the
// keys, then looks up its distinct keys in the earlier ranges. Hash-based: keys are partitioned by
// hash, then each part is numbered in the cache. No key is looked up twice, but there are several
// more passes. With a million distinct keys, a range's hash table does not fit in a cache, and
// cache misses cost more than these passes. So beyond kMostByRange, the range-based algorithm is
// used only if keys repeat often enough that most lookups hit the cache.
constexpr int64_t kMostByRange = int64_t{1} << 21;
constexpr int64_t kLargeSample = 16384;
// Keys repeat often if at most this share of a large sample is distinct.
constexpr double kOftenRepeated = 0.45;
// Maximum number of threads for the range-based algorithm if keys seldom repeat: with more, looking
// up distinct keys in all earlier ranges dominates the work.
constexpr int kMostRangesOfDistinct = 4;
constexpr int64_t kLeastByHash = int64_t{1} << 17;
constexpr int64_t kLeastSampled = int64_t{1} << 16;
constexpr int64_t kSample = 2048;

// Returns the number of distinct keys in a sample of `size` evenly spaced keys.
template <class Key>
int64_t distinct_of_sample(const Key* keys, int64_t n, int64_t size, int64_t seed,
                           void* workspace) {
  Arena memory(workspace);
  auto* distinct = memory.take<Distinct<Key>>(size);
  auto* sample = memory.take<Key>(size);
  auto* entries = memory.take<uint32_t>(DistinctKeyMap<Key>::entries_for(size));
  for (int64_t i = 0; i < size; ++i) sample[i] = keys[i * (n / size)];
  DistinctKeyMap<Key> numbering(distinct, size, entries, seed);
  numbering.add(sample, 0, size, [](int64_t, uint32_t) {});
  return numbering.size();
}

// Estimates from a sample whether most keys are distinct. A sample of s keys, drawn from m equally
// frequent keys, has about s * s / (2 * m) repeats. If m > n, most of the n keys are distinct.
template <class Key>
bool mostly_distinct(const Key* keys, int64_t n, int64_t seed, void* workspace) {
  const int64_t repeated = kSample - distinct_of_sample(keys, n, kSample, seed, workspace);
  return repeated * n <= kSample * kSample / 2;
}

// Returns true if the hash-based algorithm should be used.
template <class Key>
bool seldom_repeat(const Key* keys, int64_t n, int64_t seed, void* workspace) {
  return static_cast<double>(distinct_of_sample(keys, n, kLargeSample, seed, workspace)) >
         kOftenRepeated * kLargeSample;
}

}  // namespace

int64_t unique_workspace_bytes(int64_t n) {
  const int64_t seed = 0;
  const int64_t by_range = Arena::bytes_of<ByRange<int64_t, int64_t>>(n, seed);
  if (n < kLeastByHash) return by_range;
  return std::max(by_range, Arena::bytes_of<ByHash<int64_t, int64_t>>(n, seed));
}

template <class Key, class Index>
int64_t unique(const Key* keys, int64_t n, int64_t seed, Key* unique_keys, Index* inverse,
               int64_t* counts, void* workspace, const ParallelFor& parallel_for) {
  const bool many = n > kMostByRange;
  const bool distinct = !many && n >= kLeastSampled && mostly_distinct(keys, n, seed, workspace);
  const bool by_hash =
      many ? seldom_repeat(keys, n, seed, workspace)
           : n >= kLeastByHash && distinct && parallel_for.num_threads() > kMostRangesOfDistinct;
  Arena arena(workspace);
  if (by_hash) {
    return ByHash<Key, Index>(arena, n, seed).run(keys, unique_keys, inverse, counts, parallel_for);
  }
  return ByRange<Key, Index>(arena, n, seed)
      .run(keys, distinct, unique_keys, inverse, counts, parallel_for);
}

template decltype(unique<int32_t, int64_t>) unique<int32_t, int64_t>;
template decltype(unique<int64_t, int64_t>) unique<int64_t, int64_t>;
template decltype(unique<int64_t, int32_t>) unique<int64_t, int32_t>;

}  // namespace sparsekit::cpu
