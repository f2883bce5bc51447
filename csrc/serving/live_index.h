// An index of one side that can be changed.
#pragma once

#include <cstdint>

#include "serving/memory.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::serving {

// Buckets that no lookup reads meanwhile. Their `spilled` counts stay those of the keys that are
// there, as in the tables of training (csrc/core/cpu/hash_table.cpp).
class LiveIndex {
 public:
  LiveIndex() = default;
  // `memory` has the buckets from its first byte on, and can be written to.
  LiveIndex(Memory memory, int64_t num_buckets, int64_t seed, int64_t num_keys);

  // Makes room for `more` keys besides those that are there, in a larger index if need be. Returns
  // false, and changes nothing, if there is no memory or the index is damaged.
  bool reserve(int64_t more);

  // Gives a key a row. Returns its row before, -1 if it had none, or kDamaged.
  int64_t put(int64_t key, int32_t row);

  // Removes a key. Returns its row before, -1 if it had none, or kDamaged.
  int64_t remove(int64_t key);

  // Returns the row of a key, or -1.
  int64_t find(int64_t key) const;

  // Loads the lines that put() and remove() will read.
  void prefetch(int64_t key) const;

  // Copies another index, which may be read meanwhile. Returns false if there is no memory.
  bool copy(const Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t num_keys);

  const Bucket* buckets() const { return static_cast<const Bucket*>(memory_.data()); }
  int64_t num_buckets() const { return num_buckets_; }
  int64_t seed() const { return seed_; }
  int64_t num_keys() const { return num_keys_; }

  static constexpr int64_t kDamaged = -2;

 private:
  Bucket* all() { return static_cast<Bucket*>(memory_.data()); }

  // Finds the bucket of a key and its slot there; false if the key is absent.
  bool locate(int64_t key, int64_t* bucket, int* slot) const;

  Memory memory_;
  int64_t num_buckets_ = 0;
  int64_t seed_ = 0;
  int64_t num_keys_ = 0;
};

}  // namespace sparsekit::serving
