// zlib's CRC-32, computed 16 bytes at a time ("slicing-by-16").
#include <array>
#include <cstring>

#include "serving/include/sparsekit_serving.h"

namespace {

constexpr int kSlices = 16;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// tables[k][b] is the CRC of byte b followed by k zeros.
constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? 0xEDB88320U : 0U);
    tables[0][byte] = crc;
  }
  for (int k = 1; k < kSlices; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// Combines the table entries for four bytes; `zeros` more bytes follow the fourth.
inline uint32_t of_word(uint32_t word, int zeros) {
  return kTables[zeros + 3][word & 0xFF] ^ kTables[zeros + 2][(word >> 8) & 0xFF] ^
         kTables[zeros + 1][(word >> 16) & 0xFF] ^ kTables[zeros][word >> 24];
}

}  // namespace

uint32_t sk_crc32(uint32_t crc, const void* bytes, size_t n) {
  const auto* p = static_cast<const uint8_t*>(bytes);
  crc = ~crc;
  for (; n >= kSlices; n -= kSlices, p += kSlices) {
    uint32_t words[4];
    std::memcpy(words, p, sizeof words);
    crc = of_word(words[0] ^ crc, 12) ^ of_word(words[1], 8) ^ of_word(words[2], 4) ^
          of_word(words[3], 0);
  }
  for (; n > 0; --n, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFF];
  return ~crc;
}
