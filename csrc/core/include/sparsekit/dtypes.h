// Element types of rows: float, double, and BFloat16. A BFloat16 is stored in 16 bits; arithmetic
// on it is done in float.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparsekit/host_device.h"

namespace sparsekit {

struct BFloat16 {
  uint16_t bits;
};

// The type used for arithmetic on rows of type T.
template <class T>
struct Accumulate {
  using type = T;
};
template <>
struct Accumulate<BFloat16> {
  using type = float;
};
template <class T>
using Acc = typename Accumulate<T>::type;

SPARSEKIT_HOST_DEVICE inline float load(float x) {
  return x;
}
SPARSEKIT_HOST_DEVICE inline double load(double x) {
  return x;
}
SPARSEKIT_HOST_DEVICE inline float load(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
SPARSEKIT_HOST_DEVICE inline T store(Acc<T> x) {
  return static_cast<T>(x);
}
// Rounds to nearest, with ties to even. Any NaN stays a NaN.
template <>
SPARSEKIT_HOST_DEVICE inline BFloat16 store<BFloat16>(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40;
  return BFloat16{static_cast<uint16_t>(x != x ? nan : rounded)};
}

// Instantiates function<T>, or function<Rule, T>, for every dtype of rows. Use this macro at the
// end of the file that defines the function.
#define SPARSEKIT_INSTANTIATE(function)                 \
  template decltype(function<float>) function<float>;   \
  template decltype(function<double>) function<double>; \
  template decltype(function<BFloat16>) function<BFloat16>;
#define SPARSEKIT_INSTANTIATE_RULE(function, Rule)                  \
  template decltype(function<Rule, float>) function<Rule, float>;   \
  template decltype(function<Rule, double>) function<Rule, double>; \
  template decltype(function<Rule, BFloat16>) function<Rule, BFloat16>;

}  // namespace sparsekit
