// A modifiable index of a table, for one side of a snapshot.
#pragma once

#include <cstdint>

#include "serving/memory.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::serving {

// No lookup may read the buckets while they change. `spilled` always counts only keys that are
// present, as in the hash tables used in training (csrc/core/cpu/hash_table.cpp).
class LiveIndex {
 public:
  LiveIndex() = default;
  // `memory` is writable, and begins with the buckets.
  LiveIndex(Memory memory, int64_t num_buckets, int64_t seed, int64_t num_keys);

  // Makes room for `more` additional keys, in a larger index if necessary. Returns false, and
  // changes nothing, if there is no memory or the index is damaged.
  bool reserve(int64_t more);

  // Maps a key to a row. Returns the key's previous row, -1 if it had none, or kDamaged.
  int64_t put(int64_t key, int32_t row);

  // Removes a key. Returns its previous row, -1 if it had none, or kDamaged.
  int64_t remove(int64_t key);

  // Returns the row of a key, or -1.
  int64_t find(int64_t key) const;

  // Prefetches the cache lines that put() and remove() will read.
  void prefetch(int64_t key) const;

  // Copies another index, even while lookups read it. Returns false if there is no memory.
  bool copy(const Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t num_keys);

  const Bucket* buckets() const { return static_cast<const Bucket*>(memory_.data()); }
  int64_t num_buckets() const { return num_buckets_; }
  int64_t seed() const { return seed_; }
  int64_t num_keys() const { return num_keys_; }

  static constexpr int64_t kDamaged = -2;

 private:
  Bucket* all() { return static_cast<Bucket*>(memory_.data()); }

  // Finds a key's bucket and its slot in that bucket; returns false if the key is absent.
  bool locate(int64_t key, int64_t* bucket, int* slot) const;

  Memory memory_;
  int64_t num_buckets_ = 0;
  int64_t seed_ = 0;
  int64_t num_keys_ = 0;
};

}  // namespace sparsekit::serving
