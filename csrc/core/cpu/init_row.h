// Computes the initial vector of one key.
#pragma once

#include <algorithm>
#include <cstdint>

#include "sparsekit/dtypes.h"
#include "sparsekit/initial_values.h"

namespace sparsekit::cpu {

template <class T>
void init_row(T* row, int64_t dim, int64_t key, const Initializer& initializer) {
  for (int64_t column = 0; column < dim; column += 4) {
    float values[4];
    initial_values(initializer, key, column / 4, values);
    const int64_t width = std::min<int64_t>(4, dim - column);
    for (int64_t j = 0; j < width; ++j) row[column + j] = store<T>(Acc<T>{values[j]});
  }
}

}  // namespace sparsekit::cpu
