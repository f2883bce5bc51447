// Rows of a weight with what an optimizer keeps beside them.
#pragma once

#include <cstdint>
#include <cstring>

#include "sparsekit/dtypes.h"
#include "sparsekit/philox.h"

namespace sparsekit {

constexpr int kMostStates = 3;

// weight [num_rows, dim], contiguous; state k of row r begins at states[k] + r * strides[k].
template <class T>
struct RowTable {
  T* weight;
  Acc<T>* states[kMostStates];
  int64_t strides[kMostStates];
  int64_t num_rows;
  int64_t dim;
  // [num_rows], or null: a number of steps for each row.
  int32_t* row_step;
};

// A step as row_step has it, where the largest number stands for all beyond it.
SPARSEKIT_HOST_DEVICE inline int32_t row_step_of(int64_t step) {
  constexpr int64_t kMost = 0x7FFFFFFF;
  return static_cast<int32_t>(step < kMost ? step : kMost);
}

// Rounds new weights to BFloat16: to the nearest, or up or down at random, with the odds that make
// the mean exact. Other types keep their bits.
struct Rounding {
  bool stochastic;
  uint64_t seed;
};

// 16 random bits for each of the columns [8 block, 8 block + 8) of a row in a step: two for a word,
// the lower half first.
SPARSEKIT_HOST_DEVICE inline Philox4x32 rounding_bits(uint64_t seed, int64_t step, int64_t row,
                                                      int64_t block) {
  const Philox4x32 counter{{static_cast<uint32_t>(row), static_cast<uint32_t>(row >> 32),
                            static_cast<uint32_t>(block), static_cast<uint32_t>(step)}};
  return philox4x32_10(counter, static_cast<uint32_t>(seed),
                       static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(step >> 32));
}
SPARSEKIT_HOST_DEVICE inline uint32_t bits_of_column(const Philox4x32& random, int64_t column) {
  // Choices and not an index, which would put the words into memory on a device.
  const int at = static_cast<int>(column & 7);
  const uint32_t low = at < 2 ? random.word[0] : random.word[1];
  const uint32_t high = at < 6 ? random.word[2] : random.word[3];
  return (at < 4 ? low : high) >> (at % 2 * 16) & 0xFFFF;
}

// Adds less than one unit of the last place, then cuts.
SPARSEKIT_HOST_DEVICE inline BFloat16 store_at_random(float x, uint32_t random16) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint32_t nan = (bits >> 16) | 0x40;
  return BFloat16{static_cast<uint16_t>(x != x ? nan : (bits + random16) >> 16)};
}

}  // namespace sparsekit
