// A top_k query, converted to integers.
#pragma once

#include <cstdint>

namespace sparsekit::serving {

// Maximum number of rows per call to a top_k kernel.
constexpr int64_t kMostAtOnce = 256;

// A query converted to integers, for fast dot products with int8 and int4 rows:
//     query[j] = unit * integers[j] + a residual.
// The score of a row with scale a, bias b and integers u[j] is then at most
//     a * unit * sum(integers[j] * u[j]) + b * sum
//         + |a| * error_of_scale + |b| * error_of_bias + least_error.
// The errors allow for the residuals and for the rounding of the score itself.
struct QuantizedQuery {
  const int16_t* integers;  // [dim]; for int4, those of even columns, then those of odd ones
  int64_t dim;
  double unit;
  double sum;
  double error_of_scale;
  double error_of_bias;
  double least_error;
};

}  // namespace sparsekit::serving
