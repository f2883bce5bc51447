// The steps of XXH64, shared by the CPU and CUDA code. They work on words in registers; each caller
// loads these words in its own way.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit::xxh64_steps {

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u;
constexpr uint64_t kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u;
constexpr uint64_t kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

// Loads little-endian numbers. They are assembled byte by byte, so that neither byte order nor
// alignment matters. gcc and clang turn each function into one load instruction.
inline uint64_t load32(const uint8_t* p) {
  return uint64_t{p[0]} | uint64_t{p[1]} << 8 | uint64_t{p[2]} << 16 | uint64_t{p[3]} << 24;
}
inline uint64_t load64(const uint8_t* p) {
  return uint64_t{p[0]} | uint64_t{p[1]} << 8 | uint64_t{p[2]} << 16 | uint64_t{p[3]} << 24 |
         uint64_t{p[4]} << 32 | uint64_t{p[5]} << 40 | uint64_t{p[6]} << 48 | uint64_t{p[7]} << 56;
}

// Loads `size` < 8 bytes.
inline uint64_t load_few(const uint8_t* p, size_t size) {
  if (size >= 4) return load32(p) | load32(p + size - 4) << 8 * (size - 4);
  uint64_t word = 0;
  for (size_t k = 0; k < size; ++k) word |= uint64_t{p[k]} << 8 * k;
  return word;
}

SPARSEKIT_HOST_DEVICE inline uint64_t rotate_left(uint64_t x, int bits) {
  return (x << bits) | (x >> (64 - bits));
}

SPARSEKIT_HOST_DEVICE inline uint64_t absorb(uint64_t accumulator, uint64_t lane) {
  return rotate_left(accumulator + lane * kPrime2, 31) * kPrime1;
}

// Mixes in the bytes that remain after the 32-byte stripes: 8, 4 or 1 at a time.
SPARSEKIT_HOST_DEVICE inline uint64_t add8(uint64_t hash, uint64_t word) {
  return rotate_left(hash ^ absorb(0, word), 27) * kPrime1 + kPrime4;
}

SPARSEKIT_HOST_DEVICE inline uint64_t add4(uint64_t hash, uint64_t word) {
  return rotate_left(hash ^ (word * kPrime1), 23) * kPrime2 + kPrime3;
}

SPARSEKIT_HOST_DEVICE inline uint64_t add1(uint64_t hash, uint64_t byte) {
  return rotate_left(hash ^ (byte * kPrime5), 11) * kPrime1;
}

SPARSEKIT_HOST_DEVICE inline uint64_t finish(uint64_t hash) {
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace sparsekit::xxh64_steps
