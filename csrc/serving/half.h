// Converts between float and float16 using integer arithmetic, with the same bits on all
// processors.
#pragma once

#include <cstdint>
#include <cstring>

namespace sparsekit::serving {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr uint16_t kHalfInfinity = 0x7C00;

// Rounds to nearest, with ties to even. Magnitudes of 65520 and above become infinite.
inline uint16_t half_of(float x) {
  const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
  const uint32_t bits = bits_of(x) & 0x7FFFFFFF;
  if (bits > 0x7F800000) return static_cast<uint16_t>(sign | 0x7E00);          // NaN
  if (bits >= 0x47800000) return static_cast<uint16_t>(sign | kHalfInfinity);  // 65536 and above
  if (bits < 0x38800000) {  // below the least normal number, 2^-14
    // The sum's last bit is worth 2^-24, as in a float16 of this size, so the addition rounds.
    const uint32_t rounded = bits_of(float_of(bits) + 0.5F) - bits_of(0.5F);
    return static_cast<uint16_t>(sign | rounded);
  }
  // Change the bias of the exponent from 127 to 15, and round at bit 13.
  const uint32_t rebiased = bits - (112U << 23);
  return static_cast<uint16_t>(sign | ((rebiased + 0xFFF + ((rebiased >> 13) & 1)) >> 13));
}

inline float float_of_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t bits = static_cast<uint32_t>(half & 0x7FFF) << 13;
  const uint32_t exponent = bits & 0x0F800000;
  if (exponent == 0x0F800000) return float_of(sign | (bits + (224U << 23)));  // infinity, NaN
  if (exponent != 0) return float_of(sign | (bits + (112U << 23)));
  // Zero or subnormal: the mantissa counts units of 2^-24.
  const float magnitude = static_cast<float>(half & 0x7FFF) * 0x1p-24F;
  return float_of(sign | bits_of(magnitude));
}

}  // namespace sparsekit::serving
