// Row numbers and segment ids in either of two widths.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

// One number per entry: int64 if `wide` is not null, otherwise int32 in `narrow`.
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
