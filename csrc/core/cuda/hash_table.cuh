// Finds and inserts keys; each lane may use a different table.
#pragma once

#include <cstdint>

#include "cuda/simt.cuh"
#include "sparsekit/hash_table.h"

namespace sparsekit::cuda {

// The quarter of a bucket that one lane reads. Quarters 0 and 1 hold two keys each, quarter 2 holds
// the fifth key and two rows, and quarter 3 holds three rows and the count of spilled keys.
using Quarter = simt::Vec<int64_t, 2>;
constexpr int kLanesPerKey = 4;

SPARSEKIT_DEVICE int32_t low(int64_t word) {
  return static_cast<int32_t>(static_cast<uint64_t>(word));
}
SPARSEKIT_DEVICE int32_t high(int64_t word) {
  return static_cast<int32_t>(static_cast<uint64_t>(word) >> 32);
}

// Returns the row of this lane's key in this lane's table, or -1 if the key is absent or `wanted`
// is false. All lanes of the warp must call this function. Four lanes form a group that reads a
// bucket together: in round j, the group looks up the key of its lane j. So one load instruction
// covers eight cache lines, and each lane has four loads in flight.
SPARSEKIT_DEVICE int32_t find_row(const Bucket* buckets, int64_t num_buckets, int64_t seed,
                                  int64_t key, bool wanted) {
  const int quarter = simt::lane() % kLanesPerKey;
  const int group = simt::lane() - quarter;
  int64_t bucket = wanted ? home_bucket(key, seed, num_buckets) : 0;
  int32_t row = -1;
  // The number of steps is bounded, so that the search ends even in a damaged table.
  for (int64_t step = 0;; ++step) {
    wanted = wanted && step < num_buckets;
    const uint32_t pending = simt::warp_ballot(wanted);
    if (pending == 0) break;
    const uint64_t line = simt::to_number(buckets + bucket);
    Quarter parts[kLanesPerKey];
#pragma unroll
    for (int j = 0; j < kLanesPerKey; ++j) {
      const uint64_t of_lane = simt::warp_shuffle(line, group + j);
      if ((pending >> (group + j)) & 1) {
        parts[j] = simt::from_number<const Quarter>(of_lane)[quarter];
      } else {
        parts[j] = Quarter{{0, 0}};
      }
    }
#pragma unroll
    for (int j = 0; j < kLanesPerKey; ++j) {
      const int64_t sought = simt::warp_shuffle(key, group + j);
      const int64_t a = parts[j].at[0], b = parts[j].at[1];
      const uint32_t firsts = simt::warp_ballot(quarter <= 2 && a == sought) >> group;
      const uint32_t seconds = simt::warp_ballot(quarter <= 1 && b == sought) >> group;
      // Bit s is set if slot s has this key. An empty slot has key 0 and a negative row, but used
      // slots come first, so the lowest set bit is a used slot if the key is in this bucket.
      const uint32_t slots = (firsts & 1) | (seconds & 1) << 1 | (firsts & 2) << 1 |
                             (seconds & 2) << 2 | (firsts & 4) << 2;
      const int slot = slots == 0 ? 0 : simt::lowest_bit(slots);
      const int32_t mine = quarter == 2 ? (slot == 0 ? low(b) : high(b))
                           : slot == 2  ? low(a)
                           : slot == 3  ? high(a)
                                        : low(b);
      const int32_t found = simt::warp_shuffle(mine, group + (slot <= 1 ? 2 : 3));
      // Evaluate Bucket::passed(): in the last quarter, b holds the last row and the count.
      const int32_t passed = simt::warp_shuffle(high(b), group + 3);
      const bool is_found = slots != 0 && found >= 0;
      if (quarter == j && wanted && (is_found || passed <= 0)) {
        row = is_found ? found : -1;
        wanted = false;
      }
    }
    bucket = bucket + 1 == num_buckets ? 0 : bucket + 1;
  }
  return row;
}

// Inserts a key that is in no bucket. No other thread inserts this key, and no thread looks it up
// before the next launch. So the slot's row may be claimed first and the key written afterwards.
// Returns false if no slot is free, or if *status is not 0 because another thread has already found
// all buckets full.
SPARSEKIT_DEVICE bool insert_absent(Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t key,
                                    int32_t row, const int64_t* status) {
  int64_t b = home_bucket(key, seed, num_buckets);
  for (int64_t step = 0; step < num_buckets; ++step) {
    // Stop if another thread has found all buckets full.
    if (step % 64 == 63 && simt::load(status) != 0) return false;
    Bucket& bucket = *simt::global(buckets + b);
    int32_t seen[kSlotsPerBucket];
#pragma unroll
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) seen[slot] = simt::load(&bucket.rows[slot]);
#pragma unroll
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      if (seen[slot] < 0 && simt::atomic_cas(&bucket.rows[slot], int32_t{-1}, row) == -1) {
        bucket.keys[slot] = key;
        return true;
      }
    }
    simt::atomic_add(&bucket.spilled, int32_t{1});
    b = b + 1 == num_buckets ? 0 : b + 1;
  }
  return false;
}

}  // namespace sparsekit::cuda
