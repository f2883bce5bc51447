// Describes the tables of one version, for lookups.
#pragma once

#include <cstdint>
#include <vector>

#include "serving/format.h"
#include "sparsekit/init_rows.h"

namespace sparsekit::serving {

// The rows that unknown keys share have the lowest keys, beginning with this one.
constexpr int64_t kFirstFallback = INT64_MIN;

// The file formats use the same values of sk_row_format, sk_miss and sk_combiner.
struct TableView {
  const Bucket* buckets;
  int64_t num_buckets;
  int64_t index_seed;
  // Row r begins at rows + r * row_bytes. A row >= row_limit, which only a damaged index has,
  // counts as absent. Rows from deltas directly follow those from the file.
  const uint8_t* rows;
  int64_t row_limit;
  int64_t num_keys;
  int64_t dim;
  int64_t row_bytes;
  int32_t row_format;
  int32_t miss;
  Initializer initializer;
  int64_t num_fallbacks;
  int32_t combiner;
  bool has_padding_key;
  int64_t padding_key;
  const char* name;
};

struct Version {
  std::vector<TableView> tables;
  uint64_t version = 0;
  uint64_t dense_version = 0;
  int64_t step = -1;
  int64_t written_at = 0;
};

}  // namespace sparsekit::serving
