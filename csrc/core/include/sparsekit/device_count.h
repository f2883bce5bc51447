// Sizes that only the device knows.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

// A number of entries: `most`, or the smaller number that lies at `exact` in device memory when the
// kernel runs. So one op can work on the result of another without a word to the host.
struct DeviceCount {
  int64_t most;
  const int64_t* exact = nullptr;

  SPARSEKIT_HOST_DEVICE int64_t get() const {
    if (exact == nullptr) return most;
    return *exact < 0 ? 0 : *exact < most ? *exact : most;
  }
};

}  // namespace sparsekit
