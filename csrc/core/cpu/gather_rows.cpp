#include "sparsekit/gather_rows.h"

#include <algorithm>

#include "cpu/first_bad.h"
#include "cpu/sum_rows.h"

namespace sparsekit::cpu {

int64_t gather_rows(const void* table, int64_t num_rows, int64_t row_bytes, int64_t stride_bytes,
                    const int64_t* rows, int64_t n, void* out, const ParallelFor& parallel_for) {
  const char* source = static_cast<const char*>(table);
  char* target = static_cast<char*>(out);
  FirstBad bad;
  const int64_t grain = std::max<int64_t>(1, 65536 / std::max<int64_t>(row_bytes, 1));
  const int64_t ahead = rows_ahead<char>(row_bytes);
  parallel_for(0, n, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + ahead < end && rows[i + ahead] >= 0 && rows[i + ahead] < num_rows) {
        prefetch_row(source + rows[i + ahead] * stride_bytes, row_bytes);
      }
      char* copy = target + i * row_bytes;
      if (rows[i] >= num_rows) return bad.report(i);
      if (rows[i] < 0) {
        std::fill_n(copy, row_bytes, char{0});
      } else {
        std::copy_n(source + rows[i] * stride_bytes, row_bytes, copy);
      }
    }
  });
  return bad.position();
}

}  // namespace sparsekit::cpu
