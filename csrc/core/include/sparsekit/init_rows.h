// Initial vectors of embedding rows.
#pragma once

#include <cstdint>

#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

enum class Distribution : int64_t { kConstant = 0, kUniform = 1, kNormal = 2 };

// The value of (seed, key, column): one draw of Philox4x32-10 with the seed as its key and
// (key, column / 4) as its counter, so it depends on nothing else: not on the device, the number
// of ranks or the order of insertion.
//   kConstant: a;   kUniform: [a, b);   kNormal: mean a, standard deviation b (Box-Muller).
// Computed in float whatever the storage type, so that all dtypes start from the same numbers; as
// BFloat16 a uniform one may be rounded up to b.
struct Initializer {
  uint64_t seed;
  Distribution distribution;
  float a;
  float b;
};

namespace cpu {

// out[rows[i]] = initial vector of keys[i], for the i with rows[i] >= first_row; with rows null
// out[i] instead, for all i. out [num_rows, dim], keys [n], rows [n], which must not name one row
// twice unless with the same key. Returns -1, or the first position whose row is >= num_rows.
template <class T>
int64_t init_rows(T* out, int64_t num_rows, int64_t dim, const int64_t* keys, const int64_t* rows,
                  int64_t n, int64_t first_row, const Initializer& initializer,
                  const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

// The first row to write is max(0, *first_row), read on the device; null means 0. If device_seed is
// not null, it is the initializer's seed. Rows that are
// >= num_rows are left out and reported in *bad, as in gather_rows. Uniform and constant values are
// those of the CPU, bit for bit; of normal ones the last bit may differ.
template <class T>
void init_rows(T* out, int64_t num_rows, int64_t dim, const int64_t* keys, const int64_t* rows,
               int64_t n, const int64_t* first_row, const Initializer& initializer,
               const int64_t* device_seed, int64_t* bad, void* stream);

}  // namespace cuda
}  // namespace sparsekit
