// Functions shared by the hashing of Python objects, Arrow columns and numpy strings.
#pragma once

#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "sparsekit/hash_integers.h"
#include "sparsekit/xxh64.h"

namespace sparsekit {

struct DropReference {
  void operator()(PyObject* object) const { Py_DECREF(object); }
};
using Reference = std::unique_ptr<PyObject, DropReference>;

// Minimum number of values per thread; with fewer, starting a thread costs more than it saves.
constexpr Py_ssize_t kGrain = 32768;

// Number of values in a chunk.
constexpr int64_t kChunk = 8192;

// Distributes the range [0, n) to threads in chunks, on demand, so that a thread that starts late
// or is delayed gets fewer chunks.
class Chunks {
 public:
  Chunks(int64_t n, int64_t chunk) : n_(n), chunk_(chunk) {}

  // Takes the next chunk; returns false if there is none left.
  bool next(int64_t* begin, int64_t* end) {
    *begin = next_.fetch_add(chunk_, std::memory_order_relaxed);
    *end = std::min(*begin + chunk_, n_);
    return *begin < n_;
  }

 private:
  const int64_t n_, chunk_;
  std::atomic<int64_t> next_{0};
};

// Calls work(chunks) in up to num_threads threads, including this one. `work` must not throw.
template <class Work>
void share(Py_ssize_t n, int num_threads, const Work& work) {
  const Py_ssize_t count = std::clamp<Py_ssize_t>(n / kGrain, 1, num_threads);
  Chunks chunks(n, count == 1 ? n : kChunk);
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<size_t>(count - 1));
    while (static_cast<Py_ssize_t>(others.size()) < count - 1) {
      others.emplace_back([&] { work(chunks); });
    }
  } catch (const std::exception&) {
    // If no more threads can be started, the existing ones do all the work.
  }
  work(chunks);
  for (auto& other : others) other.join();
}

// Calls body(begin, end) for parts of [0, n), in up to num_threads threads. `body` must not throw.
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

// Calls body(), which must not throw, without the GIL. Taking the GIL back may end the thread while
// Python exits, so it must not happen in a destructor.
template <class Body>
void without_gil(const Body& body) {
  PyThreadState* const state = PyEval_SaveThread();
  body();
  PyEval_RestoreThread(state);
}

}  // namespace sparsekit
