// Checks of hash tables, shared by every op that takes one.
#pragma once

#include "device_context.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::ops {

constexpr int64_t kWordsPerBucket = sizeof(Bucket) / sizeof(int64_t);

template <class Name>
void check_buckets(const Tensor& buckets, const char* op, const Name& name) {
  check_dtype(buckets, ScalarType::Long, op, name);
  check_dim(buckets, 2, op, name);
  check_size(buckets, 1, kWordsPerBucket, op, name);
  check(buckets.size(0) > 0, op, ": ", name, " must not be empty");
  check_mutable(buckets, op, name);
  check(!kOnDevice || reinterpret_cast<uintptr_t>(buckets.const_data_ptr()) % 16 == 0, op, ": ",
        name, " must lie at a multiple of 16 bytes");
}

// One int64: a table's size, or its hash_seed.
template <class Name>
void check_word(const Tensor& word, const char* op, const Name& name) {
  check_dtype(word, ScalarType::Long, op, name);
  check_dim(word, 1, op, name);
  const int64_t has = word.numel();
  check(has == 1, op, ": ", name, " must have one element, got ", has);
}

inline void check_size_value(int64_t size, int64_t num_buckets, const char* op,
                             const char* name = "size") {
  check(size >= 0 && size <= num_buckets * kSlotsPerBucket, op, ": ", name, " is ", size,
        ", but the buckets have ", num_buckets * kSlotsPerBucket, " slots");
}

}  // namespace sparsekit::ops
