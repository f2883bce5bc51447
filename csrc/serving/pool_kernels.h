// Kernels that find, decode and pool rows, compiled once for each instruction set.
#pragma once

#include <cstdint>

#include "sparsekit/hash_table.h"

namespace sparsekit::serving {

struct PoolRows {
  int32_t row_format;  // sk_row_format
  int64_t dim;
  const uint8_t* const* rows;  // [n]; null for a row of zeros
  const float* weights;        // [n], or null for weights of 1
  int64_t n;                   // at most kSumRun
};

constexpr int32_t kSearchOn = -2;

// All instruction sets give the same bits.
struct PoolKernels {
  // Looks for keys in their home buckets. rows[i] becomes the row of keys[i], -1 if the key is in
  // no bucket, or kSearchOn if a search has to go on with the next bucket.
  void (*find)(const Bucket* buckets, const int64_t* homes, const int64_t* keys, int64_t n,
               int32_t* rows);
  // Writes the sum of weight * row to `out` [dim], or adds it to `out`. Rows are added in their
  // order.
  void (*sum)(const PoolRows& rows, float* out, bool add);
  // Writes the largest element of each column to `out` [dim], or the largest of those and `out`.
  // The first one wins a tie, and the first NaN wins over everything. No row may be null, and there
  // must be one.
  void (*max)(const PoolRows& rows, float* out, bool with_out);
  // Decodes the columns [begin, end) of a row. `begin` must be a multiple of 4.
  void (*decode)(int32_t row_format, const uint8_t* row, int64_t dim, int64_t begin, int64_t end,
                 float* out);
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
// avx2 or avx512) lowers the choice, for tests. Returns an sk_status.
int choose_kernels(const PoolKernels** kernels);

}  // namespace sparsekit::serving
