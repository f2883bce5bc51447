// Sizes that are known only on the device, and row indices or segment ids of either width.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

// A number of entries: `most` if `exact` is null, otherwise the smaller of `most` and *exact, which
// is read in device memory when the kernel runs. This lets an op consume the result of another op
// without a round trip to the host.
struct DeviceCount {
  int64_t most;
  const int64_t* exact = nullptr;

  SPARSEKIT_HOST_DEVICE int64_t get() const {
    if (exact == nullptr) return most;
    const int64_t count = *exact;  // read once: another thread may be writing to it
    return count < 0 ? 0 : count < most ? count : most;
  }
};

// An array with one integer per entry: int64 in `wide` if it is not null, otherwise int32 in
// `narrow`.
struct EntryNumbers {
  const int64_t* wide;
  const int32_t* narrow;

  SPARSEKIT_HOST_DEVICE int64_t operator[](int64_t i) const {
    return wide != nullptr ? wide[i] : narrow[i];
  }
  SPARSEKIT_HOST_DEVICE EntryNumbers from(int64_t i) const {
    return wide != nullptr ? EntryNumbers{wide + i, nullptr} : EntryNumbers{nullptr, narrow + i};
  }
};

}  // namespace sparsekit
