// Encodes float rows in the row formats of files, and decodes them.
//
// Values are computed one operation at a time (-ffp-contract=off), so that the bits are the same
// everywhere and match FBGEMM's FloatToFusedNBitRowwiseQuantizedSBHalf.
#include <cmath>
#include <cstring>

#include "serving/format.h"
#include "serving/half.h"
#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::serving {
namespace {

constexpr uint32_t kInfinity = 0x7F800000;

// Each lane keeps the extremes of every 16th value. The compiler keeps lanes in vector registers.
constexpr int64_t kLanes = 16;

struct Range {
  float min, max;
  bool nan;
};

Range range_of(const float* x, int64_t dim) {
  float least[kLanes], most[kLanes];
  for (int64_t k = 0; k < kLanes; ++k) least[k] = most[k] = x[0];
  uint32_t nan = 0;
  int64_t i = 0;
  const auto add = [&](int64_t lane, float value) {
    least[lane] = value < least[lane] ? value : least[lane];
    most[lane] = value > most[lane] ? value : most[lane];
    nan |= static_cast<uint32_t>((bits_of(value) & 0x7FFFFFFF) > kInfinity);
  };
  for (; i + kLanes <= dim; i += kLanes) {
    for (int64_t k = 0; k < kLanes; ++k) add(k, x[i + k]);
  }
  for (; i < dim; ++i) add(0, x[i]);
  Range range{least[0], most[0], nan != 0};
  for (int64_t k = 1; k < kLanes; ++k) {
    if (least[k] < range.min) range.min = least[k];
    if (most[k] > range.max) range.max = most[k];
  }
  if (range.min == 0) {
    // Zeros of either sign compare equal; take the first one, so that the result does not depend on
    // the lanes.
    int64_t first = 0;
    while (x[first] != 0) ++first;
    range.min = x[first];
  }
  return range;
}

// Rounds a number in [0, 255] to the nearest integer, ties to even. The sum has no bits for
// fractions, so the addition itself rounds, in the processor's default rounding mode.
inline uint32_t nearest(float x) {
  return bits_of(x + 0x1.8p23F) & 0xFF;
}

// Writes q, scale and bias. Returns false, and writes nothing, if they cannot represent the row.
template <int kBits>
bool quantize(const float* x, int64_t dim, uint8_t* out) {
  constexpr float kMost = (1 << kBits) - 1;
  const Range range = range_of(x, dim);
  if (range.nan) return false;
  const uint16_t bias_bits = half_of(range.min);
  const float bias = float_of_half(bias_bits);
  const float width = range.max - bias;
  uint16_t scale_bits = width == 0 ? half_of(1.0F) : half_of(width / kMost);
  if ((bias_bits & 0x7FFF) >= kHalfInfinity || (scale_bits & 0x7FFF) >= kHalfInfinity) return false;
  if ((scale_bits & 0x7FFF) == 0) scale_bits = half_of(1.0F);
  // The inverse of any nonzero float16, even a subnormal one, is finite in float32.
  const float inverse = 1.0F / float_of_half(scale_bits);
  const auto q = [=](float value) {
    const float scaled = (value - bias) * inverse;
    const float positive = scaled > 0 ? scaled : 0;
    return nearest(positive < kMost ? positive : kMost);
  };
  if constexpr (kBits == 8) {
    for (int64_t i = 0; i < dim; ++i) out[i] = static_cast<uint8_t>(q(x[i]));
    out += dim;
  } else {
    for (int64_t i = 0; i + 1 < dim; i += 2) {
      *out++ = static_cast<uint8_t>(q(x[i]) | q(x[i + 1]) << 4);
    }
    if (dim % 2 != 0) *out++ = static_cast<uint8_t>(q(x[dim - 1]));
  }
  std::memcpy(out, &scale_bits, 2);
  std::memcpy(out + 2, &bias_bits, 2);
  return true;
}

template <int kBits>
void dequantize(const uint8_t* row, int64_t dim, float* out) {
  const uint8_t* end = row + (kBits == 8 ? dim : (dim + 1) / 2);
  uint16_t scale_bits, bias_bits;
  std::memcpy(&scale_bits, end, 2);
  std::memcpy(&bias_bits, end + 2, 2);
  const float scale = float_of_half(scale_bits), bias = float_of_half(bias_bits);
  for (int64_t i = 0; i < dim; ++i) {
    const int q = kBits == 8 ? row[i] : (row[i / 2] >> (i % 2 * 4)) & 15;
    out[i] = scale * static_cast<float>(q) + bias;
  }
}

// Rounds each value to 16 bits. Returns false if a value is NaN, becomes infinite when rounded, or
// is infinite while `infinities` is false. `out` is then undefined.
template <class Round>
bool round_all(const float* x, int64_t dim, uint8_t* out, uint16_t infinity, bool infinities,
               const Round& round) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < dim; ++i) {
    const uint32_t magnitude = bits_of(x[i]) & 0x7FFFFFFF;
    const uint16_t rounded = round(x[i]);
    const bool same = infinities && magnitude == kInfinity;
    bad |= static_cast<uint32_t>((rounded & 0x7FFF) >= infinity && !same);
    std::memcpy(out + 2 * i, &rounded, 2);
  }
  return bad == 0;
}

// Returns false if the format cannot hold the row.
bool encode(int32_t format, const float* x, int64_t dim, uint8_t* out) {
  switch (format) {
    case SK_FLOAT32: {
      uint32_t nan = 0;
      for (int64_t i = 0; i < dim; ++i) {
        nan |= static_cast<uint32_t>((bits_of(x[i]) & 0x7FFFFFFF) > kInfinity);
      }
      std::memcpy(out, x, sizeof(float) * dim);
      return nan == 0;
    }
    case SK_FLOAT16:
      return round_all(x, dim, out, kHalfInfinity, false, [](float v) { return half_of(v); });
    case SK_BFLOAT16:
      return round_all(x, dim, out, 0x7F80, true, [](float v) { return store<BFloat16>(v).bits; });
    case SK_INT8:
      return quantize<8>(x, dim, out);
    default:
      return quantize<4>(x, dim, out);
  }
}

void decode(int32_t format, const uint8_t* row, int64_t dim, float* out) {
  switch (format) {
    case SK_FLOAT32:
      std::memcpy(out, row, sizeof(float) * dim);
      return;
    case SK_FLOAT16:
    case SK_BFLOAT16:
      for (int64_t i = 0; i < dim; ++i) {
        uint16_t bits;
        std::memcpy(&bits, row + 2 * i, 2);
        out[i] = format == SK_FLOAT16 ? float_of_half(bits) : load(BFloat16{bits});
      }
      return;
    case SK_INT8:
      return dequantize<8>(row, dim, out);
    default:
      return dequantize<4>(row, dim, out);
  }
}

int check(const char* function, int32_t format, const void* rows, int64_t n, int64_t dim,
          const void* out) {
  if (format < SK_FLOAT32 || format > SK_INT4) {
    return fail(SK_BAD_ARGUMENT, "%s: row_format %d is none of sk_row_format", function, format);
  }
  if (dim < 1 || dim > kMostDim) {
    return fail(SK_BAD_ARGUMENT, "%s: dim is %lld, and must be in [1, %lld]", function,
                static_cast<long long>(dim), static_cast<long long>(kMostDim));
  }
  if (n < 0) {
    return fail(SK_BAD_ARGUMENT, "%s: n is %lld", function, static_cast<long long>(n));
  }
  if (n > 0 && (rows == nullptr || out == nullptr)) {
    return fail(SK_BAD_ARGUMENT, "%s: %s is null", function, rows == nullptr ? "rows" : "out");
  }
  return SK_OK;
}

}  // namespace
}  // namespace sparsekit::serving

using namespace sparsekit::serving;

int64_t sk_row_bytes(int32_t row_format, int64_t dim) {
  if (dim < 1 || dim > kMostDim) return 0;
  switch (row_format) {
    case SK_FLOAT32:
      return 4 * dim;
    case SK_FLOAT16:
    case SK_BFLOAT16:
      return 2 * dim;
    case SK_INT8:
      return dim + 4;
    case SK_INT4:
      return (dim + 1) / 2 + 4;
    default:
      return 0;
  }
}

int sk_encode_rows(int32_t row_format, const float* rows, int64_t n, int64_t dim, void* out,
                   int64_t* bad) {
  if (const int status = check("sk_encode_rows", row_format, rows, n, dim, out)) return status;
  if (bad == nullptr) return fail(SK_BAD_ARGUMENT, "sk_encode_rows: bad is null");
  const int64_t row_bytes = sk_row_bytes(row_format, dim);
  auto* bytes = static_cast<uint8_t*>(out);
  *bad = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (!encode(row_format, rows + i * dim, dim, bytes + i * row_bytes)) {
      *bad = i;
      return fail(SK_BAD_ARGUMENT,
                  "sk_encode_rows: row %lld has values that the format cannot hold",
                  static_cast<long long>(i));
    }
  }
  return SK_OK;
}

int sk_decode_rows(int32_t row_format, const void* rows, int64_t n, int64_t dim, float* out) {
  if (const int status = check("sk_decode_rows", row_format, rows, n, dim, out)) return status;
  const int64_t row_bytes = sk_row_bytes(row_format, dim);
  const auto* bytes = static_cast<const uint8_t*>(rows);
  for (int64_t i = 0; i < n; ++i) decode(row_format, bytes + i * row_bytes, dim, out + i * dim);
  return SK_OK;
}
