// Reads the strings of an Arrow array and the bitmap of its valid items.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <type_traits>

#include "cpu/first_bad.h"
#include "hash_values.h"

namespace sparsekit {

// Reports to `bad` that string i is outside its array's memory, and returns an empty string. Not
// inlined, since the calling loops have no registers to spare.
#if defined(__GNUC__)
__attribute__((cold, noinline))
#endif
inline std::string_view outside(cpu::FirstBad* bad, int64_t i) {
  bad->report(i);
  return {};
}

// The call operator of each type below returns string i of an array.
template <class Offset>
struct OffsetTexts {
  using Size = std::make_unsigned_t<Offset>;  // unsigned, so that negative offsets become huge

  const Offset* offsets;
  const char* data;
  Size end_of_data;
  cpu::FirstBad* bad;
  std::string_view operator()(int64_t i) const {
    const auto begin = static_cast<Size>(offsets[i]), end = static_cast<Size>(offsets[i + 1]);
    if (begin > end || end > end_of_data) return outside(bad, i);
    return {data + begin, end - begin};
  }
};

struct FixedTexts {
  const char* data;
  int64_t size;
  std::string_view operator()(int64_t i) const {
    return {data + i * size, static_cast<size_t>(size)};
  }
};

// Reads an array of 16-byte views. A view begins with the string's length. A string of at most 12
// bytes follows directly; a longer one is given by its first four bytes, the index of a buffer, and
// its offset in that buffer.
struct ViewTexts {
  const char* views;
  const void* const* data;
  const int64_t* sizes;  // sizes of the buffers
  int64_t num_buffers;
  cpu::FirstBad* bad;
  std::string_view operator()(int64_t i) const {
    int32_t view[4];
    std::memcpy(view, views + i * 16, sizeof view);
    const auto size = static_cast<size_t>(view[0]);
    if (size <= 12) return {views + i * 16 + 4, size};
    const int64_t begin = view[3], buffer = view[2];
    if (view[0] < 0 || begin < 0 || buffer < 0 || buffer >= num_buffers ||
        begin + view[0] > sizes[buffer]) {
      return outside(bad, i);
    }
    return {static_cast<const char*>(data[buffer]) + begin, size};
  }
};

// The validity bitmap of an array, starting at an offset. If there is no bitmap, all items are
// valid.
struct Validity {
  const uint8_t* bits;
  int64_t offset;
  bool operator()(int64_t i) const {
    i += offset;
    return bits == nullptr || (bits[i >> 3] >> (i & 7) & 1) != 0;
  }
};

inline Validity validity_of(const ArrowArray& array) {
  return {static_cast<const uint8_t*>(array.buffers[0]), array.offset};
}

template <class T>
const T* buffer_of(const ArrowArray& array, int which) {
  return static_cast<const T*>(array.buffers[which]);
}

}  // namespace sparsekit
