// Rows of a weight, and their optimizer states.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparsekit/dtypes.h"
#include "sparsekit/philox.h"

namespace sparsekit {

constexpr int kMostStates = 3;

// The rows of `weight` [num_rows, dim], and their states. Row r begins at weight + r * stride, and
// its state k at states[k] + r * strides[k].
template <class T>
struct RowTable {
  T* weight;
  int64_t stride;
  Acc<T>* states[kMostStates];
  int64_t strides[kMostStates];
  int64_t num_rows;
  int64_t dim;
  // [num_rows] each row's step count; null if rows do not count steps.
  int32_t* row_step;
};

// Converts a step number to an element of row_step. Larger numbers become the largest int32.
SPARSEKIT_HOST_DEVICE inline int32_t row_step_of(int64_t step) {
  constexpr int64_t kMost = 0x7FFFFFFF;
  return static_cast<int32_t>(step < kMost ? step : kMost);
}

// Specifies how new weights are rounded to BFloat16: to nearest, or stochastically. Stochastic
// rounding goes up or down with probabilities that make the expected value exact. Other types are
// not rounded.
struct Rounding {
  bool stochastic;
  uint64_t seed;
};

// Returns 16 random bits for each of the columns [8 * block, 8 * block + 8) of a row in a step. Two
// columns share a word; the first column gets the lower half.
SPARSEKIT_HOST_DEVICE inline Philox4x32 rounding_bits(uint64_t seed, int64_t step, int64_t row,
                                                      int64_t block) {
  const Philox4x32 counter{{static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32),
                            static_cast<uint32_t>(block), static_cast<uint32_t>(step)}};
  return philox4x32_10(counter, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(step >> 32));
}
SPARSEKIT_HOST_DEVICE inline uint32_t bits_of_column(const Philox4x32& random, int64_t column) {
  // Select the word with ?:, since on a device an index would put the words into memory.
  const int at = static_cast<int>(column & 7);
  const uint32_t low = at < 2 ? random.word[0] : random.word[1];
  const uint32_t high = at < 6 ? random.word[2] : random.word[3];
  return (at < 4 ? low : high) >> (at % 2 * 16) & 0xFFFF;
}

// Rounds stochastically: adds a random amount below one unit in the last place, then truncates.
SPARSEKIT_HOST_DEVICE inline BFloat16 store_at_random(float x, uint32_t random16) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t nan = (bits >> 16) | 0x40;
  return BFloat16{static_cast<uint16_t>(x != x ? nan : (bits + random16) >> 16)};
}

}  // namespace sparsekit
