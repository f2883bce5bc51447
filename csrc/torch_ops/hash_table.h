// Checks the arguments of hash tables, for all ops that take one.
#pragma once

#include "arguments.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::ops {

constexpr int64_t kWordsPerBucket = sizeof(Bucket) / sizeof(int64_t);

// Checks the buckets of a table, and returns their number.
inline int64_t read_buckets(Arguments& given, const Item& name, const Tensor& buckets) {
  given.written_rows(name, buckets, ScalarType::Long);
  const auto [num_buckets, words] = given.check_dim(name, buckets, 2);
  given.check(words == kWordsPerBucket, name, " must have size ", kWordsPerBucket,
              " in dimension 1, got ", words);
  given.check_contiguous(name, buckets);
  given.check(num_buckets > 0, name, " must not be empty");
  given.check(!kOnDevice || reinterpret_cast<uintptr_t>(buckets.const_data_ptr()) % 16 == 0, name,
              " must lie at a multiple of 16 bytes");
  return num_buckets;
}

inline void check_size_value(const Arguments& given, const Item& name, int64_t size,
                             int64_t num_buckets) {
  given.check(size >= 0 && size <= num_buckets * kSlotsPerBucket, name, " is ", size,
              ", but the buckets have ", num_buckets * kSlotsPerBucket, " slots");
}

}  // namespace sparsekit::ops
