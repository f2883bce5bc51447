// What the hashing of Python objects, of Arrow columns and of numpy's texts have in common.
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

// Below this many values for each, threads cost more than they save.
constexpr Py_ssize_t kGrain = 32768;

// Calls body(begin, end) for up to num_threads parts of [0, n), the last in this thread. `body`
// must not throw.
template <class Body>
void split(Py_ssize_t n, int num_threads, const Body& body) {
  const Py_ssize_t parts = std::clamp<Py_ssize_t>(n / kGrain, 1, num_threads);
  std::vector<std::thread> others;
  Py_ssize_t begin = 0;
  try {
    others.reserve(static_cast<size_t>(parts - 1));
    for (Py_ssize_t part = 1; part < parts; ++part) {
      const Py_ssize_t end = n * part / parts;
      others.emplace_back(body, begin, end);
      begin = end;
    }
  } catch (const std::exception&) {
    // No memory or no thread to be had: what is left is done here.
  }
  body(begin, n);
  for (auto& other : others) other.join();
}

// Makes `first` the lower of itself and i.
inline void keep_first(std::atomic<int64_t>& first, int64_t i) {
  int64_t before = first;
  while (i < before && !first.compare_exchange_weak(before, i)) {
  }
}

inline bool check_num_threads(int num_threads) {
  if (num_threads >= 1) return true;
  PyErr_SetString(PyExc_ValueError, "num_threads must be positive");
  return false;
}

inline int64_t code_of(std::string_view text, uint64_t seed) {
  return static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
}

template <class Integer>
int64_t code_of_integer(Integer value, uint64_t seed) {
  using Wide = std::conditional_t<std::is_signed_v<Integer>, int64_t, uint64_t>;
  return static_cast<int64_t>(hash_decimal(static_cast<Wide>(value), seed));
}

// Calls body(), which must not throw, while other threads of Python may run. No destructor takes
// the GIL back: as Python ends, that ends the thread, which must not happen in one.
template <class Body>
void without_gil(const Body& body) {
  PyThreadState* const state = PyEval_SaveThread();
  body();
  PyEval_RestoreThread(state);
}

}  // namespace sparsekit
