// Helpers for hashing Python objects, Arrow columns and numpy strings: the code of a single value,
// the UTF-8 encoding of code points, and threads. The text parser also uses these threads.
#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "sparsekit/hash_integers.h"
#include "sparsekit/parallel.h"
#include "sparsekit/xxh64.h"
#include "sparsekit/xxh64_steps.h"

namespace sparsekit {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, DropReference>;

// Minimum number of values per thread; with fewer, starting a thread costs more than it saves.
constexpr Py_ssize_t kGrain = 32768;

// Number of values in a chunk.
constexpr int64_t kChunk = 8192;

// Distributes the range [0, n) among threads. A thread takes one chunk at a time, so a thread that
// starts late or is delayed gets fewer chunks.
class Chunks {
 public:
  Chunks(int64_t n, int64_t chunk) : n_(n), chunk_(chunk) {}

  // Takes the next chunk. Returns false if there are no more chunks.
  bool next(int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    *end = std::min(*begin + chunk_, n_);
    return *begin < n_;
  }

 private:
  const int64_t n_, chunk_;
  std::atomic<int64_t> next_{0};
};

// Runs each part but the last on a new thread. The calling thread runs the last part, and any part
// whose thread could not be started.
inline void run_on_threads(int64_t begin, int64_t end, int64_t, ParallelFor::Body body,
                           void* context) {
  std::vector<std::thread> others;
  try {
    for (; begin + 1 < end; ++begin) others.emplace_back(body, begin, begin + 1, context);
  } catch (const std::exception&) {
  }
  body(begin, end, context);
  for (auto& other : others) other.join();
}

// Calls work(chunks) on up to num_threads threads, including this one. `work` must not throw.
template <class Work>
void share(Py_ssize_t n, int num_threads, const Work& work) {
  const Py_ssize_t count = std::clamp<Py_ssize_t>(n / kGrain, 1, num_threads);
  Chunks chunks(n, count == 1 ? n : kChunk);
  ParallelFor(&run_on_threads).each(count, [&](int64_t) { work(chunks); });
}

// Calls body(begin, end) for parts of [0, n), on up to num_threads threads. `body` must not throw.
template <class Body>
void split(Py_ssize_t n, int num_threads, const Body& body) {
  share(n, num_threads, [&](Chunks& chunks) {
    for (int64_t begin = 0, end = 0; chunks.next(&begin, &end);) body(begin, end);
  });
}

inline int64_t code_of(std::string_view text, uint64_t seed) {
  return static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
}

template <class Integer>
int64_t code_of_integer(Integer value, uint64_t seed) {
  using Wide = std::conditional_t<std::is_signed_v<Integer>, int64_t, uint64_t>;
  return static_cast<int64_t>(hash_decimal(static_cast<Wide>(value), seed));
}

// Calls body() without the GIL. body() must not throw. Do not call this in a destructor: if Python
// is exiting, taking the GIL back may end the thread.
template <class Body>
void without_gil(const Body& body) {
  PyThreadState* const state = PyEval_SaveThread();
  body();
  PyEval_RestoreThread(state);
}

// Writes up to 4 bytes and returns the end of the output, or null if the code point is not a
// character.
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

// Writes the UTF-8 encoding to `out`, a buffer of at least 4 bytes per code point. Returns the end
// of the output, or null if a code point is not a character.
template <class Point>
char* put_utf8(const Point* text, size_t size, char* out) {
  for (size_t k = 0; k < size && out != nullptr; ++k) out = put_utf8(text[k], out);
  return out;
}

// Stores a word in the byte order that xxh64_steps::load64() reads, little-endian. Does not write
// single bytes, since gcc would not combine them into one store.
inline void store64(uint64_t word, char* out) {
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
  word = __builtin_bswap64(word);
#endif
  std::memcpy(out, &word, 8);
}

// Encodes the first `count` bytes of a little-endian word of Latin-1 as UTF-8. The other bytes must
// be zero. Returns the end of the output; up to 8 bytes beyond this end are overwritten.
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

// Encodes Latin-1 text as UTF-8. Every byte of Latin-1 is a character, so this cannot fail. `out`
// must have room for the result and 8 more bytes.
inline char* put_utf8(const uint8_t* text, size_t size, char* out) {
  for (; size >= 8; size -= 8, text += 8) {
    out = put_latin1_word(xxh64_steps::load64(text), 8, out);
  }
  return put_latin1_word(xxh64_steps::load_few(text, size), size, out);
}

}  // namespace sparsekit
