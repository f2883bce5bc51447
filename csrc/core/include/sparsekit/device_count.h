// Sizes that are known only on the device, and arrays that hold either int64 or int32.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

// A number of entries. If `exact` is null, the number is `most`; otherwise it is the smaller of
// `most` and *exact, which is in device memory and is read when the kernel runs. This lets an op
// consume another op's result without a round trip to the host.
struct DeviceCount {
  int64_t most;
  const int64_t* exact = nullptr;

  SPARSEKIT_HOST_DEVICE int64_t get() const {
    if (exact == nullptr) return most;
    const int64_t count = *exact;  // read once: another thread may be writing to it
    return count < 0 ? 0 : count < most ? count : most;
  }
};

// An array with one integer per entry. If `wide` is not null, it holds the integers as int64;
// otherwise `narrow` holds them as int32.
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
