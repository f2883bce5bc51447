// Row indices or segment ids, stored as int64 or as int32.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

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
