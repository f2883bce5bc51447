// Kernels of top_k. Included after pool_rows.h; its rules apply here, too.

constexpr int kScoreLanes = 16;
constexpr int kScoreVectors = kScoreLanes / kMostLanes;

// Adds lanes i and i + 8, then i and i + 4, then i and i + 2, then i and i + 1.
inline float sum_lanes(const Floats<kMostLanes>* lanes) {
  Floats<4> fours[4];
  __builtin_memcpy(fours, lanes, sizeof fours);
  const Floats<4> four = (fours[0] + fours[2]) + (fours[1] + fours[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

template <class Format>
inline float score_row(const uint8_t* bytes, const float* query, int64_t dim) {
  const Row<Format> row(bytes, dim);
  Floats<kMostLanes> lanes[kScoreVectors] = {};
  int64_t j = 0;
  for (; j + kScoreLanes <= dim; j += kScoreLanes) {
#pragma GCC unroll 4
    for (int v = 0; v < kScoreVectors; ++v) {
      const int64_t column = j + v * kMostLanes;
      lanes[v] += row.template at<kMostLanes>(column) * read<Floats<kMostLanes>>(query + column);
    }
  }
  for (int lane = 0; j < dim; ++j, ++lane) {
    lanes[lane / kMostLanes][lane % kMostLanes] += row.template at<1>(j) * query[j];
  }
  return sum_lanes(lanes);
}

void score(int32_t row_format, const uint8_t* const* rows, int64_t n, const float* query,
           int64_t dim, float* scores) {
  with_format(row_format, [&](auto format) {
    for (int64_t i = 0; i < n; ++i) {
      scores[i] = score_row<decltype(format)>(rows[i], query, dim);
    }
  });
}

// Multiplies the integers of int8 rows by those of the query; see QuantizedQuery.
void dot_bytes(const uint8_t* const* rows, int64_t n, const int16_t* query, int64_t dim,
               int32_t* dots) {
  for (int64_t i = 0; i < n; ++i) {
    int32_t dot = 0;
    for (int64_t j = 0; j < dim; ++j) dot += static_cast<int16_t>(rows[i][j]) * query[j];
    dots[i] = dot;
  }
}

void dot_nibbles(const uint8_t* const* rows, int64_t n, const int16_t* even, const int16_t* odd,
                 int64_t pairs, int32_t* dots) {
  for (int64_t i = 0; i < n; ++i) {
    int32_t low = 0, high = 0;
    for (int64_t j = 0; j < pairs; ++j) low += static_cast<int16_t>(rows[i][j] & 15) * even[j];
    for (int64_t j = 0; j < pairs; ++j) high += static_cast<int16_t>(rows[i][j] >> 4) * odd[j];
    dots[i] = low + high;
  }
}

int64_t select(int32_t row_format, const uint8_t* const* rows, int64_t n,
               const QuantizedQuery& query, double least, int32_t* selected) {
  int32_t dots[kMostAtOnce] = {};
  const int64_t pairs = (query.dim + 1) / 2;
  if (row_format == SK_INT8) {
    dot_bytes(rows, n, query.integers, query.dim, dots);
  } else {
    dot_nibbles(rows, n, query.integers, query.integers + pairs, pairs, dots);
  }
  const int64_t end = row_format == SK_INT8 ? query.dim : pairs;
  uint16_t scales[kMostAtOnce] = {}, biases[kMostAtOnce] = {};  // float16
  for (int64_t i = 0; i < n; ++i) {
    scales[i] = read<uint16_t>(rows[i] + end);
    biases[i] = read<uint16_t>(rows[i] + end + 2);
  }
  int64_t num_selected = 0;
  for (int64_t i = 0; i < n; i += kMostLanes) {
    const auto* scale_bytes = reinterpret_cast<const uint8_t*>(scales + i);
    const auto* bias_bytes = reinterpret_cast<const uint8_t*>(biases + i);
    const Floats<kMostLanes> scale = Float16::load<kMostLanes>(scale_bytes, 0);
    const Floats<kMostLanes> bias = Float16::load<kMostLanes>(bias_bytes, 0);
    int64_t below[kMostLanes], num_below = 0;
    for (int lane = 0; lane < kMostLanes; ++lane) {
      const double a = scale[lane], b = bias[lane];
      const double most = a * (query.unit * dots[i + lane]) + b * query.sum +
                          __builtin_fabs(a) * query.error_of_scale +
                          __builtin_fabs(b) * query.error_of_bias + query.least_error;
      below[lane] = most < least;  // false for NaN, which only damaged rows give
      num_below += below[lane];
    }
    if (num_below == kMostLanes) continue;
    for (int64_t j = i; j < n && j < i + kMostLanes; ++j) {
      if (!below[j - i]) selected[num_selected++] = static_cast<int32_t>(j);
    }
  }
  return num_selected;
}
