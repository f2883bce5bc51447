// Computes how far a state decays in steps without a gradient, and after how many such steps it has
// vanished.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "sparsekit/host_device.h"

namespace sparsekit {

// Returns the smallest k for which the sum ratio^k + ratio^(k + 1) + ... is below 2^-53 * ratio.
inline int64_t steps_to_vanish(double ratio) {
  if (ratio <= 0) return 0;
  if (ratio >= 1) return std::numeric_limits<int64_t>::max();
  return static_cast<int64_t>(
      std::ceil(1 + (std::log(1 - ratio) - 53 * std::log(2.0)) / std::log(ratio)));
}

// Returns base^steps for a base in [0, 1). Squaring needs fewer registers in a kernel than pow. Its
// error, at most steps * 2^-53, does not matter for a state that has decayed.
SPARSEKIT_HOST_DEVICE inline double power_of(double base, int64_t steps) {
  double power = 1;
  for (; steps > 0; steps >>= 1, base *= base) {
    if (steps & 1) power *= base;
  }
  return power;
}

}  // namespace sparsekit
