#include "sparsekit/init_rows.h"

#include <algorithm>

#include "cpu/first_bad.h"
#include "sparsekit/initial_values.h"

namespace sparsekit::cpu {
template <class T>
int64_t init_rows(T* out, int64_t num_rows, int64_t dim, int64_t stride, const int64_t* keys,
                  const int64_t* rows, int64_t n, int64_t first_row, const Initializer& initializer,
                  const ParallelFor& parallel_for) {
  FirstBad bad;
  const int64_t grain = std::max<int64_t>(1, 4096 / std::max<int64_t>(dim, 1));
  parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = rows == nullptr ? i : rows[i];
      if (row < first_row) continue;
      if (row >= num_rows) return bad.report(i);
      init_row(out + row * stride, dim, keys[i], initializer);
    }
  });
  return bad.position();
}

SPARSEKIT_INSTANTIATE(init_rows)

}  // namespace sparsekit::cpu
