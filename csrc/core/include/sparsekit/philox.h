// Generates counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

struct Philox4x32 {
  uint32_t word[4];
};

// Returns the four random words for a 128-bit counter and a 64-bit key.
SPARSEKIT_HOST_DEVICE inline Philox4x32 philox4x32_10(Philox4x32 counter, uint32_t key0,
                                                      uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = Philox4x32{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                          static_cast<uint32_t>(product1),
                          static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                          static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace sparsekit
