// boost::unordered_flat_map with a C interface. Compiled by native.py on first use.

#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>

namespace {
using Map = boost::unordered_flat_map<int64_t, int64_t>;
}

extern "C" {

void* map_new(int64_t capacity) {
  auto* map = new Map;
  map->reserve(capacity);
  return map;
}

void map_free(void* map) {
  delete static_cast<Map*>(map);
}

// Removes all keys, but keeps the memory.
void map_clear(void* map) {
  static_cast<Map*>(map)->clear();
}

// Writes the value of each key, or -1 for an unknown key.
void map_find(const void* map, const int64_t* keys, int64_t n, int64_t* out) {
  const Map& m = *static_cast<const Map*>(map);
  const auto end = m.end();
  for (int64_t i = 0; i < n; ++i) {
    const auto found = m.find(keys[i]);
    out[i] = found == end ? -1 : found->second;
  }
}

// Writes the value of each key; a new key's value is the number of keys inserted before it.
void map_emplace(void* map, const int64_t* keys, int64_t n, int64_t* out) {
  Map& m = *static_cast<Map*>(map);
  for (int64_t i = 0; i < n; ++i) {
    out[i] = m.emplace(keys[i], static_cast<int64_t>(m.size())).first->second;
  }
}
}
