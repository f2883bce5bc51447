// Kernels that decode, pool and score rows, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "serving/quantized_query.h"

namespace sparsekit::serving {

// Sums are computed in runs of this length, as in training (csrc/core/cpu/sum_rows.h).
constexpr int64_t kSumRun = 256;

// A table's index and rows, used to find a key's row.
struct RowIndex {
  const void* buckets;  // Bucket [num_buckets]
  int64_t num_buckets;
  const uint8_t* rows;
  int64_t row_limit;  // rows >= row_limit count as absent
  int64_t row_bytes;
};

// Properties shared by bags that are pooled together.
struct PoolBags {
  int32_t row_format;  // sk_row_format
  int32_t combiner;    // sk_combiner
  int64_t dim;
  const uint8_t* const* rows;  // null for a row of zeros, which only sums may have
  const float* weights;        // as long as `rows`, or null for weights of 1
  int64_t stride;              // floats from one bag's vector to the next
  bool go_on;                  // whether to add to, or compare with, what `out` has
};

// All instruction sets give bit-identical results.
struct PoolKernels {
  // Sets rows[i] to the row of keys[i], whose home bucket is homes[i], and prefetches it; sets it
  // to null if the key has no row. Returns how many are null.
  int64_t (*find)(const RowIndex& index, const int64_t* keys, const int64_t* homes, int64_t n,
                  const uint8_t** rows);
  // Pools bags into `out`. Bag b consists of the rows from the end of bag b - 1 (for bag 0, from
  // `begin`) to ends[b]. Rows are added in order, in runs of kSumRun. A maximum is the first of
  // the largest elements; the first NaN, if any, beats all numbers.
  void (*pool)(const PoolBags& bags, int64_t begin, const int32_t* ends, int64_t num_bags,
               float* out);
  // Decodes the columns [begin, end) of a row. `begin` must be a multiple of 4.
  void (*decode)(int32_t row_format, const uint8_t* row, int64_t dim, int64_t begin, int64_t end,
                 float* out);
  // Writes the score of rows[i], as top_k() defines it, to scores[i], for i in [0, n).
  void (*score)(int32_t row_format, const uint8_t* const* rows, int64_t n, const float* query,
                int64_t dim, float* scores);
  // Given n <= kMostAtOnce int8 or int4 rows, writes the positions of those whose scores may be
  // `least` or more, and returns the number of positions.
  int64_t (*select)(int32_t row_format, const uint8_t* const* rows, int64_t n,
                    const QuantizedQuery& query, double least, int32_t* selected);
};

#if defined(__x86_64__) && defined(__GNUC__)
#define SPARSEKIT_SERVING_X86
namespace avx512 {
bool is_supported();
extern const PoolKernels kernels;
}  // namespace avx512
namespace avx2 {
bool is_supported();
extern const PoolKernels kernels;
}  // namespace avx2
#endif
namespace generic {
extern const PoolKernels kernels;
}  // namespace generic

// Chooses the kernels for this machine. The environment variable SPARSEKIT_SERVING_ISA (generic,
// avx2 or avx512) can limit the choice, for tests. Returns an sk_status.
int choose_kernels(const PoolKernels** kernels);

}  // namespace sparsekit::serving
