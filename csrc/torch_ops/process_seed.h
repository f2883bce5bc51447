// The seed of hash tables that live no longer than a call.
#pragma once

#include <cstdint>
#include <random>

namespace sparsekit::ops {

// Drawn once for the process, so that nobody can make keys that collide. Results do not depend on
// it.
inline int64_t process_seed() {
  static const int64_t seed = [] {
    std::random_device random;  // the system's
    return static_cast<int64_t>(uint64_t{random()} << 32 | random());
  }();
  return seed;
}

}  // namespace sparsekit::ops
