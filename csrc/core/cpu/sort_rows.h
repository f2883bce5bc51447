// Sorts row indices.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "sparsekit/arena.h"

namespace sparsekit::cpu {

// Radix sort by 11-bit digits, lowest digit first. Row indices have two or three such digits.
class RowSort {
 public:
  RowSort(Arena& arena, int64_t n)
      : pairs_(arena.take<uint64_t>(n)),
        others_(arena.take<uint64_t>(n)),
        places_(arena.take<int32_t>(n)) {}

  // Writes the rows [n] to sorted [n] in ascending order. Returns an array [n] with the position of
  // each row in `sorted`.
  const int32_t* places(const int32_t* rows, int64_t n, int64_t* sorted) const {
    uint64_t* pairs = pairs_;
    uint32_t most = 0;
    bool rising = true;
    for (int64_t j = 0; j < n; ++j) {
      const auto row = static_cast<uint32_t>(rows[j]);
      rising &= row >= most;
      most = std::max(most, row);
      pairs[j] = static_cast<uint64_t>(row) << 32 | static_cast<uint64_t>(j);
    }
    if (!rising && n <= kFew) {
      std::sort(pairs, pairs + n);
    } else if (!rising) {
      uint64_t* others = others_;
      for (int shift = 0; shift < 32 && most >> shift != 0; shift += kDigitBits) {
        sort_by_digit(pairs, n, 32 + shift, others);
        std::swap(pairs, others);
      }
    }
    for (int64_t place = 0; place < n; ++place) {
      sorted[place] = static_cast<int64_t>(pairs[place] >> 32);
      places_[static_cast<uint32_t>(pairs[place])] = static_cast<int32_t>(place);
    }
    return places_;
  }

 private:
  static constexpr int64_t kFew = 256;
  static constexpr int kDigitBits = 11;
  static constexpr uint64_t kDigits = uint64_t{1} << kDigitBits;

  static void sort_by_digit(const uint64_t* pairs, int64_t n, int shift, uint64_t* to) {
    int64_t next[kDigits] = {};
    for (int64_t j = 0; j < n; ++j) ++next[pairs[j] >> shift & (kDigits - 1)];
    int64_t position = 0;
    for (int64_t& place : next) position += std::exchange(place, position);
    for (int64_t j = 0; j < n; ++j) to[next[pairs[j] >> shift & (kDigits - 1)]++] = pairs[j];
  }

  uint64_t* pairs_;  // [n] row in the high half, its index in the low half
  uint64_t* others_;
  int32_t* places_;
};

}  // namespace sparsekit::cpu
