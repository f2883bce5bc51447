// Searches buckets for a key.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsekit/hash_table.h"
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace sparsekit::cpu {

inline void prefetch(const void* address) {
  __builtin_prefetch(address, 0, 2);
  // GCC assumes that a function that only prefetches has no effect, and removes calls to it. This
  // statement emits no instruction, but counts as a side effect.
  asm volatile("");
}

// Returns a bit mask of the slots whose key equals `key`. An empty slot matches key 0. Used slots
// come first, so if the key is in the bucket, the lowest set bit is a used slot.
inline uint32_t match_slots(const Bucket& bucket, int64_t key) {
#ifdef __AVX2__
  const __m256i wanted = _mm256_set1_epi64x(key);
  const __m256i first4 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bucket.keys));
  const __m256i equal = _mm256_cmpeq_epi64(first4, wanted);
  const uint32_t mask = static_cast<uint32_t>(_mm256_movemask_pd(_mm256_castsi256_pd(equal)));
  return mask | (static_cast<uint32_t>(bucket.keys[4] == key) << 4);
#else
  uint32_t mask = 0;
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
    mask |= static_cast<uint32_t>(bucket.keys[slot] == key) << slot;
  }
  return mask;
#endif
}

// Returns the first empty slot, or kSlotsPerBucket if the bucket is full. The AVX2 version has no
// branch, since the branch would be mispredicted.
inline int first_empty_slot(const Bucket& bucket) {
#ifdef __AVX2__
  // The second half of the bucket holds a key, the rows and `spilled`. Empty slots have a negative
  // row.
  static_assert(offsetof(Bucket, rows) == 40 && sizeof(bucket.rows) == 20);
  const auto* half = reinterpret_cast<const __m256i*>(&bucket.keys[4]);
  const __m256 words = _mm256_castsi256_ps(_mm256_loadu_si256(half));
  const uint32_t negative = static_cast<uint32_t>(_mm256_movemask_ps(words)) >> 2;
  return __builtin_ctz(negative | 1u << kSlotsPerBucket);
#else
  int slot = 0;
  while (slot < kSlotsPerBucket && bucket.rows[slot] >= 0) ++slot;
  return slot;
#endif
}

inline int64_t next_bucket(int64_t bucket, int64_t num_buckets) {
  return bucket + 1 == num_buckets ? 0 : bucket + 1;
}

enum class Probe { kFound, kAbsent, kMoveOn };

// Looks for `key` in one bucket of its search path. *row becomes the key's row, or -1 if the key is
// not in this bucket.
template <class Row>
inline Probe probe_bucket(const Bucket& bucket, int64_t key, Row* row) {
  const uint32_t slots = match_slots(bucket, key);
  if (slots != 0) {
    *row = bucket.rows[__builtin_ctz(slots)];
    if (*row >= 0) return Probe::kFound;  // otherwise the slot is empty, and the key is 0
  }
  *row = -1;
  return bucket.passed() ? Probe::kMoveOn : Probe::kAbsent;
}

// Returns the row of `key`, or -1 if the key is absent. The search starts at bucket `b`. The number
// of steps is bounded, so that the search ends even in a table loaded from a damaged file.
inline int64_t find_from(const Bucket* buckets, int64_t num_buckets, int64_t b, int64_t key) {
  int64_t row = -1;
  for (int64_t step = 0; step < num_buckets; ++step) {
    if (probe_bucket(buckets[b], key, &row) != Probe::kMoveOn) return row;
    b = next_bucket(b, num_buckets);
  }
  return -1;
}

// Inserts a new key into the first free slot, starting at the key's home bucket. Returns false, and
// changes nothing, if no slot is free. This happens only if the table is damaged or at capacity.
inline bool insert_absent(Bucket* buckets, int64_t num_buckets, int64_t home, int64_t key,
                          int32_t row) {
  int64_t b = home;
  for (int64_t step = 0; step < num_buckets; ++step) {
    const int slot = first_empty_slot(buckets[b]);
    if (slot < kSlotsPerBucket) {
      buckets[b].keys[slot] = key;
      buckets[b].rows[slot] = row;
      return true;
    }
    ++buckets[b].spilled;
    b = next_bucket(b, num_buckets);
  }
  for (int64_t i = 0; i < num_buckets; ++i) --buckets[i].spilled;
  return false;
}

}  // namespace sparsekit::cpu
