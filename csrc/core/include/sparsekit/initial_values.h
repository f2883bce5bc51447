// Computes the values that init_rows writes, with the same code on the CPU and on devices.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "sparsekit/dtypes.h"
#include "sparsekit/host_device.h"
#include "sparsekit/init_rows.h"
#include "sparsekit/philox.h"

namespace sparsekit {

// Computes the initial values of columns 4 * block to 4 * block + 3 of a key's row.
SPARSEKIT_HOST_DEVICE inline void initial_values(const Initializer& initializer, int64_t key,
                                                 int64_t block, float values[4]) {
  const float a = initializer.a, b = initializer.b;
  if (initializer.distribution == Distribution::kConstant) {
    for (int j = 0; j < 4; ++j) values[j] = a;
    return;
  }
  const auto unsigned_key = static_cast<uint64_t>(key);
  const Philox4x32 random = philox4x32_10(
      Philox4x32{{static_cast<uint32_t>(unsigned_key), static_cast<uint32_t>(unsigned_key >> 32),
                  static_cast<uint32_t>(block), 0}},
      static_cast<uint32_t>(initializer.seed), static_cast<uint32_t>(initializer.seed >> 32));
  if (initializer.distribution == Distribution::kUniform) {
    // 24 random bits give evenly spaced floats in [0, 1), all equally likely. a + u * (b - a) may
    // round up to b, which is outside the interval.
    for (int j = 0; j < 4; ++j) {
      const float u = static_cast<float>(random.word[j] >> 8) * 0x1p-24f;
      const float value = a + u * (b - a);
      values[j] = value < b || b <= a ? value : std::nextafterf(b, a);
    }
    return;
  }
  for (int j = 0; j < 4; j += 2) {
    // u is in (0, 1], so its logarithm is finite. It is a double, so that differences between
    // platforms in log and cos matter only if they change the final rounding to float.
    const double u = (static_cast<double>(random.word[j]) + 1) * 0x1p-32;
    const double radius = std::sqrt(-2 * std::log(u));
    double sine = 0, cosine = 0;
#ifdef __CUDA_ARCH__
    // Use sincospi: sin and cos have a path for huge angles that needs stack memory.
    sincospi(0x1p-31 * random.word[j + 1], &sine, &cosine);
#else
    const double angle = 2 * 3.14159265358979323846 * 0x1p-32 * random.word[j + 1];
    sine = std::sin(angle);
    cosine = std::cos(angle);
#endif
    values[j] = static_cast<float>(a + b * (radius * cosine));
    values[j + 1] = static_cast<float>(a + b * (radius * sine));
  }
}

// Computes the initial vector of a key on the CPU.
template <class T>
void init_row(T* row, int64_t dim, int64_t key, const Initializer& initializer) {
  for (int64_t column = 0; column < dim; column += 4) {
    float values[4];
    initial_values(initializer, key, column / 4, values);
    const int64_t width = std::min<int64_t>(4, dim - column);
    for (int64_t j = 0; j < width; ++j) row[column + j] = store<T>(Acc<T>{values[j]});
  }
}

}  // namespace sparsekit
