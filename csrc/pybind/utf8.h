// Code points as UTF-8.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace sparsekit {

// Writes up to 4 bytes; null if the code point is no character.
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

// The end of the UTF-8 form written to `out`, which has room for 4 bytes a code point; null if one
// of them is no character.
template <class Point>
char* put_utf8(const Point* text, size_t size, char* out) {
  for (size_t k = 0; k < size && out != nullptr; ++k) out = put_utf8(text[k], out);
  return out;
}

// Of Latin-1, in which every byte is a character. Most are ASCII: those go by eights, and the
// others without a branch.
inline char* put_utf8(const uint8_t* text, size_t size, char* out) {
  const uint8_t* const end = text + size;
  while (text != end) {
    uint64_t word;
    if (end - text >= 8) {
      std::memcpy(&word, text, 8);
      if ((word & 0x8080808080808080u) == 0) {
        std::memcpy(out, &word, 8);
        text += 8;
        out += 8;
        continue;
      }
    }
    const size_t step = end - text < 8 ? static_cast<size_t>(end - text) : 8;
    for (size_t k = 0; k < step; ++k) {
      const uint8_t point = *text++;
      const bool two = point >= 0x80;
      out[0] = static_cast<char>(two ? 0xC0 | point >> 6 : point);
      out[1] = static_cast<char>(0x80 | (point & 0x3F));
      out += two ? 2 : 1;
    }
  }
  return out;
}

}  // namespace sparsekit
