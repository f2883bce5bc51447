#include "sparsekit/init_rows.h"

#include <algorithm>
#include <cmath>

#include "cpu/first_bad.h"
#include "sparsekit/philox.h"

namespace sparsekit::cpu {
namespace {

// The four values of columns 4 * block ... 4 * block + 3.
void draw(const Initializer& initializer, int64_t key, int64_t block, float* values) {
  const auto unsigned_key = static_cast<uint64_t>(key);
  const Philox4x32 random = philox4x32_10(
      Philox4x32{{static_cast<uint32_t>(unsigned_key), static_cast<uint32_t>(unsigned_key >> 32),
                  static_cast<uint32_t>(block), 0}},
      static_cast<uint32_t>(initializer.seed), static_cast<uint32_t>(initializer.seed >> 32));
  const float a = initializer.a, b = initializer.b;
  if (initializer.distribution == Distribution::kUniform) {
    // 24 random bits make every float in [0, 1) of that spacing equally likely. a + u * (b - a)
    // may round up to b, which the interval leaves out.
    for (int j = 0; j < 4; ++j) {
      const float u = static_cast<float>(random.word[j] >> 8) * 0x1p-24f;
      const float value = a + u * (b - a);
      values[j] = value < b || b <= a ? value : std::nextafterf(b, a);
    }
    return;
  }
  for (int j = 0; j < 4; j += 2) {
    // (0, 1] for the logarithm. In double, so that the rounding of the last step is all that a
    // platform's log and cos could change.
    const double u = (static_cast<double>(random.word[j]) + 1) * 0x1p-32;
    const double angle = 2 * 3.14159265358979323846 * 0x1p-32 * random.word[j + 1];
    const double radius = std::sqrt(-2 * std::log(u));
    values[j] = static_cast<float>(a + b * (radius * std::cos(angle)));
    values[j + 1] = static_cast<float>(a + b * (radius * std::sin(angle)));
  }
}

template <class T>
void init_row(T* row, int64_t dim, int64_t key, const Initializer& initializer) {
  if (initializer.distribution == Distribution::kConstant) {
    std::fill(row, row + dim, store<T>(static_cast<Acc<T>>(initializer.a)));
    return;
  }
  for (int64_t column = 0; column < dim; column += 4) {
    float values[4];
    draw(initializer, key, column / 4, values);
    const int64_t width = std::min<int64_t>(4, dim - column);
    for (int64_t j = 0; j < width; ++j) row[column + j] = store<T>(Acc<T>{values[j]});
  }
}

}  // namespace

template <class T>
int64_t init_rows(T* out, int64_t num_rows, int64_t dim, const int64_t* keys, const int64_t* rows,
                  int64_t n, int64_t first_row, const Initializer& initializer,
                  const ParallelFor& parallel_for) {
  FirstBad bad;
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(dim, 1));
  parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows == nullptr ? i : rows[i];
      if (row < first_row) continue;
      if (row >= num_rows) return bad.report(i);
      init_row(out + row * dim, dim, keys[i], initializer);
    }
  });
  return bad.position();
}

#define SPARSEKIT_INSTANTIATE(T)                                                            \
  template int64_t init_rows(T*, int64_t, int64_t, const int64_t*, const int64_t*, int64_t, \
                             int64_t, const Initializer&, const ParallelFor&);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
