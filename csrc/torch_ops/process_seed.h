// The seed of hash tables that live only during a call.
#pragma once

#include <cstdint>
#include <random>

namespace sparsekit::ops {

// Returns a random seed, drawn once per process, so that colliding keys cannot be constructed.
// Results do not depend on it.
inline int64_t process_seed() {
  static const int64_t seed = [] {
    std::random_device random;  // the system's source of randomness
    return static_cast<int64_t>(uint64_t{random()} << 32 | random());
  }();
  return seed;
}

}  // namespace sparsekit::ops
