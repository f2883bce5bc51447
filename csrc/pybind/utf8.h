// Encodes code points as UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "sparsekit/xxh64_steps.h"

namespace sparsekit {

// Writes up to 4 bytes and returns their end, or null if the code point is not a character.
inline char* put_utf8(uint32_t point, char* out) {
  const auto put = [&](uint32_t byte) { *out++ = static_cast<char>(byte); };
  const auto put_rest = [&](int shift) { put(0x80 | (point >> shift & 0x3F)); };
  if (point < 0x80) {
    put(point);
  } else if (point < 0x800) {
    put(0xC0 | point >> 6);
    put_rest(0);
  } else if (point < 0x10000) {
    if (point >= 0xD800 && point < 0xE000) return nullptr;
    put(0xE0 | point >> 12);
    put_rest(6);
    put_rest(0);
  } else {
    if (point > 0x10FFFF) return nullptr;
    put(0xF0 | point >> 18);
    put_rest(12);
    put_rest(6);
    put_rest(0);
  }
  return out;
}

// Writes the UTF-8 encoding to `out`, a buffer of at least 4 bytes per code point, and returns its
// end, or null if a code point is not a character.
template <class Point>
char* put_utf8(const Point* text, size_t size, char* out) {
  for (size_t k = 0; k < size && out != nullptr; ++k) out = put_utf8(text[k], out);
  return out;
}

// Stores a word in little-endian order, like xxh64_steps::load64(). gcc would not turn writes of
// single bytes into a single store.
inline void store64(uint64_t word, char* out) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  std::memcpy(out, &word, 8);
}

// Encodes the first `count` bytes of a little-endian word of Latin-1 as UTF-8; the other bytes must
// be zero. Writes up to 8 bytes beyond the end that it returns.
inline char* put_latin1_word(uint64_t word, size_t count, char* out) {
  while (const uint64_t beyond_ascii = word & 0x8080808080808080u) {
    const auto before = static_cast<size_t>(__builtin_ctzll(beyond_ascii)) / 8;
    store64(word, out);
    word >>= 8 * before;
    out[before] = static_cast<char>(0xC0 | (word >> 6 & 3));
    out[before + 1] = static_cast<char>(0x80 | (word & 0x3F));
    out += before + 2;
    word >>= 8;
    count -= before + 1;
  }
  store64(word, out);
  return out + count;
}

// Encodes Latin-1, in which every byte is a character, as UTF-8. `out` must have 8 bytes
// more than the result.
inline char* put_utf8(const uint8_t* text, size_t size, char* out) {
  for (; size >= 8; size -= 8, text += 8) {
    out = put_latin1_word(xxh64_steps::load64(text), 8, out);
  }
  return put_latin1_word(xxh64_steps::load_few(text, size), size, out);
}

}  // namespace sparsekit
