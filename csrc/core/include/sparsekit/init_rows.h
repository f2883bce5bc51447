// Writes initial vectors of embedding rows.
#pragma once

#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit {

enum class Distribution : int64_t { kConstant = 0, kUniform = 1, kNormal = 2 };

// The initial value is a function of (seed, key, column): one draw of Philox4x32-10 with the seed
// as its key and (key, column / 4) as its counter. So the value does not depend on the device, the
// number of ranks or the order of insertion.
//   kConstant: a;   kUniform: [a, b);   kNormal: mean a, standard deviation b (Box-Muller).
// Values are computed in float for every storage type, so that all dtypes start from the same
// numbers. Rounding to BFloat16 may turn a uniform value into b.
struct Initializer {
  uint64_t seed;
  Distribution distribution;
  float a;
  float b;
};

namespace cpu {

// Sets out[rows[i]] to the initial vector of keys[i], for all i with rows[i] >= first_row. If
// `rows` is null, sets out[i] to the initial vector of keys[i] for all i. out [num_rows, dim],
// where row r begins at element r * stride; keys [n], rows [n]. A row may occur more than once only
// if its key is the same each time. Returns -1, or the first position whose row is >= num_rows.
template <class T>
int64_t init_rows(T* out, int64_t num_rows, int64_t dim, int64_t stride, const int64_t* keys,
                  const int64_t* rows, int64_t n, int64_t first_row, const Initializer& initializer,
                  const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// Like the CPU version, but the first row to write is max(0, *first_row), read on the device; a
// null first_row means 0. If device_seed is not null, it replaces the initializer's seed. Rows >=
// num_rows are skipped and reported in *bad, as in gather_rows. Uniform and constant values match
// the CPU bit for bit; normal values may differ in the last bit.
template <class T>
void init_rows(T* out, int64_t num_rows, int64_t dim, int64_t stride, const int64_t* keys,
               const int64_t* rows, int64_t n, const int64_t* first_row,
               const Initializer& initializer, const int64_t* device_seed, int64_t* bad,
               void* stream);

}  // namespace cuda
}  // namespace sparsekit
