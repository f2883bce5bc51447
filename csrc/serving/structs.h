// Reads and writes structs that begin with their size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"

namespace sparsekit::serving {

// Copies a caller's struct. Fields that an older caller does not have become 0. A newer caller may
// have more fields than this library; they must be 0, since it cannot do what they ask for.
template <class T>
int read_struct(const T* from, const char* name, T* to) {
  const size_t size = from->size;
  if (size < sizeof(size_t)) {
    return fail(SK_BAD_ARGUMENT, "%s.size is %zu, but must be sizeof(%s)", name, size, name);
  }
  *to = T{};
  std::memcpy(to, from, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const char*>(from);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(SK_BAD_ARGUMENT,
                  "%s of %zu bytes has a field that this library does not know; it knows %zu bytes",
                  name, size, sizeof(T));
    }
  }
  return SK_OK;
}

// Fills in those fields of a caller's struct that the caller knows.
template <class T>
int write_struct(T from, const char* name, T* to) {
  const size_t size = to->size;
  if (size < sizeof(size_t)) {
    return fail(SK_BAD_ARGUMENT, "%s.size is %zu, but must be sizeof(%s)", name, size, name);
  }
  from.size = size;
  std::memcpy(to, &from, std::min(size, sizeof(T)));
  return SK_OK;
}

}  // namespace sparsekit::serving
