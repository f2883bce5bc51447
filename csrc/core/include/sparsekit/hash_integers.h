// Computes XXH64 of the decimal text of integers, so that 3 and "3" have the same hash.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"
#include "sparsekit/xxh64_steps.h"

namespace sparsekit {

// Returns the decimal digits of `value` (< 10^8) in the 8 bytes of a word, with the first digit in
// the lowest byte. Divides in parallel: splits the value into two halves of four digits, then into
// four pairs of digits, then into eight digits.
SPARSEKIT_HOST_DEVICE inline uint64_t eight_digits(uint64_t value) {
  const uint64_t fours = value / 10000 | value % 10000 << 32;
  const uint64_t hundreds = (fours * 10486 >> 20) & 0x0000007F0000007Fu;
  const uint64_t twos = hundreds | (fours - 100 * hundreds) << 16;
  const uint64_t tens = (twos * 103 >> 10) & 0x000F000F000F000Fu;
  return tens | (twos - 10 * tens) << 8;
}

// Counts the zero bytes at the low end of a word, up to 7.
SPARSEKIT_HOST_DEVICE inline int zero_bytes(uint64_t word) {
  int count = 0;
  if ((word & 0xFFFFFFFFu) == 0) count += 4, word >>= 32;
  if ((word & 0xFFFFu) == 0) count += 2, word >>= 16;
  if ((word & 0xFFu) == 0) count += 1;
  return count;
}

// Returns the XXH64 of the decimal text of an integer. The text is never stored in memory: it is
// assembled in three words, and its leading zeros are shifted out.
SPARSEKIT_HOST_DEVICE inline uint64_t hash_decimal(uint64_t magnitude, bool negative,
                                                   uint64_t seed) {
  namespace steps = xxh64_steps;
  constexpr uint64_t kZeros = 0x3030303030303030u;  // "00000000"
  constexpr uint64_t kMinus = '0' - '-';
  const uint64_t upper = magnitude / 100000000;
  const uint64_t digits[3] = {eight_digits(upper / 100000000), eight_digits(upper % 100000000),
                              eight_digits(magnitude % 100000000)};
  int word = digits[0] != 0 ? 0 : digits[1] != 0 ? 1 : 2;
  const uint64_t first = word == 0 ? digits[0] : word == 1 ? digits[1] : digits[2];
  const int skipped = word * 8 + zero_bytes(first) - (negative ? 1 : 0);
  word = skipped >> 3;
  const int shift = (skipped & 7) * 8;
  uint64_t a = word == 0 ? digits[0] : word == 1 ? digits[1] : digits[2];
  uint64_t b = word == 0 ? digits[1] : digits[2];
  uint64_t c = digits[2];
  a = (a | kZeros) - ((negative ? kMinus : 0) << shift);
  b |= kZeros;
  c |= kZeros;
  // Shift in two steps, since a single shift by 64 would be undefined.
  a = a >> shift | b << 1 << (63 - shift);
  b = b >> shift | c << 1 << (63 - shift);
  c >>= shift;

  const int length = 24 - skipped;
  uint64_t hash = seed + steps::kPrime5 + static_cast<uint64_t>(length);
  uint64_t rest = a;
  if (length >= 8) {
    hash = steps::add8(hash, a);
    rest = b;
  }
  if (length >= 16) {
    hash = steps::add8(hash, b);
    rest = c;
  }
  int left = length & 7;
  if (left >= 4) {
    hash = steps::add4(hash, rest & 0xFFFFFFFFu);
    rest >>= 32;
    left -= 4;
  }
  for (; left > 0; --left, rest >>= 8) hash = steps::add1(hash, rest & 0xFFu);
  return steps::finish(hash);
}

// Hashes the decimal text of an integer given as 64 bits, signed or unsigned.
SPARSEKIT_HOST_DEVICE inline uint64_t hash_decimal_of_bits(int64_t value, bool is_unsigned,
                                                           uint64_t seed) {
  const bool negative = value < 0 && !is_unsigned;
  const auto bits = static_cast<uint64_t>(value);
  return hash_decimal(negative ? 0 - bits : bits, negative, seed);
}

SPARSEKIT_HOST_DEVICE inline uint64_t hash_decimal(int64_t value, uint64_t seed) {
  return hash_decimal_of_bits(value, false, seed);
}

SPARSEKIT_HOST_DEVICE inline uint64_t hash_decimal(uint64_t value, uint64_t seed) {
  return hash_decimal(value, false, seed);
}

namespace cpu {

// Sets codes[i] = hash_decimal(values[i], seed) for i in [0, n). If is_unsigned is true, the values
// are the bits of unsigned integers.
void hash_integers(const int64_t* values, int64_t n, bool is_unsigned, uint64_t seed,
                   int64_t* codes, const ParallelFor& parallel_for);

}  // namespace cpu

namespace cuda {

void hash_integers(const int64_t* values, int64_t n, bool is_unsigned, uint64_t seed,
                   int64_t* codes, void* stream);

}  // namespace cuda
}  // namespace sparsekit
