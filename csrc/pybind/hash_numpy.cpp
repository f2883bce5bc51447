#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <string_view>

#include "cpu/first_bad.h"
#include "hash_parts.h"
#include "hash_values.h"
#include "sparsekit/xxh64.h"

namespace sparsekit {
namespace {

// Returns the length of a string of `size` characters without its trailing zeros, which are numpy's
// padding.
template <class Character>
Py_ssize_t length_of(const Character* text, Py_ssize_t size) {
  constexpr Py_ssize_t kStep = 8 / sizeof(Character);
  for (uint64_t word = 0; size >= kStep; size -= kStep) {
    std::memcpy(&word, text + size - kStep, sizeof word);
    if (word != 0) break;
  }
  while (size > 0 && text[size - 1] == 0) --size;
  return size;
}

// Hashes the UTF-8 encoding of a string. Returns false if a code point is not a character.
bool hash_unicode(const uint32_t* text, Py_ssize_t length, char* buffer, uint64_t seed,
                  int64_t* code) {
  // Check for ASCII first: most strings are ASCII, and compilers vectorize this loop.
  uint32_t bits = 0;
  for (Py_ssize_t k = 0; k < length; ++k) {
    bits |= text[k];
    buffer[k] = static_cast<char>(text[k]);
  }
  char* end = buffer + length;
  if (bits >= 0x80) {
    end = put_utf8(text, static_cast<size_t>(length), buffer);
    if (end == nullptr) return false;
  }
  *code = code_of({buffer, static_cast<size_t>(end - buffer)}, seed);
  return true;
}

// Three functions from numpy's C API. The API is a table with fixed indices, so the build needs no
// numpy headers. numpy has had these functions since 2.0, which introduced StringDType.
struct NumpyStrings {
  struct Text {
    size_t size;
    const char* data;
  };
  // Loads a string. Returns 0 on success, 1 if the string is missing, or -1 on failure.
  int (*load)(void* allocator, const void* packed, Text* text);
  void* (*acquire)(PyObject* dtype);
  void (*release)(void* allocator);

  bool open() {
    const Reference module(PyImport_ImportModule("numpy._core._multiarray_umath"));
    const Reference api(module ? PyObject_GetAttrString(module.get(), "_ARRAY_API") : nullptr);
    void** table = api ? static_cast<void**>(PyCapsule_GetPointer(api.get(), nullptr)) : nullptr;
    if (table == nullptr) return false;
    load = reinterpret_cast<decltype(load)>(table[313]);
    acquire = reinterpret_cast<decltype(acquire)>(table[316]);
    release = reinterpret_cast<decltype(release)>(table[318]);
    return true;
  }
};

}  // namespace

bool hash_fixed_bytes(const char* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                      int num_threads, int64_t* codes) {
  without_gil([=] {
    share(n, num_threads, [=](Chunks& chunks) {
      const auto text_of = [=](int64_t i) {
        const char* text = texts + i * size;
        return std::string_view(text, static_cast<size_t>(length_of(text, size)));
      };
      hash_texts(text_of, chunks, seed, codes);
    });
  });
  return true;
}

bool hash_fixed_unicode(const uint32_t* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                        int num_threads, int64_t* codes) {
  cpu::FirstBad bad;
  std::atomic<bool> no_memory{false};
  without_gil([=, &bad, &no_memory] {
    split(n, num_threads, [=, &bad, &no_memory](Py_ssize_t begin, Py_ssize_t end) {
      const std::unique_ptr<char[]> buffer(new (std::nothrow) char[4 * size]);
      if (!buffer) no_memory = true;
      for (Py_ssize_t i = begin; i < end && buffer; ++i) {
        const uint32_t* text = texts + i * size;
        if (!hash_unicode(text, length_of(text, size), buffer.get(), seed, &codes[i])) {
          return bad.report(i);
        }
      }
    });
  });
  if (no_memory) {
    PyErr_NoMemory();
    return false;
  }
  if (bad.position() < 0) return true;
  PyErr_Format(PyExc_ValueError,
               "values[%zd] is a str with a lone surrogate, which has no UTF-8 form",
               static_cast<Py_ssize_t>(bad.position()));
  return false;
}

bool hash_numpy_strings(PyObject* dtype, const char* texts, Py_ssize_t stride, Py_ssize_t n,
                        std::string_view missing, uint64_t seed, int num_threads, int64_t* codes) {
  NumpyStrings numpy{};
  if (!numpy.open()) return false;
  const int64_t missing_code = code_of(missing, seed);
  std::atomic<bool> failed{false};
  void* allocator = numpy.acquire(dtype);
  split(n, num_threads, [=, &failed](Py_ssize_t begin, Py_ssize_t end) {
    for (Py_ssize_t i = begin; i < end; ++i) {
      NumpyStrings::Text text{};
      const int result = numpy.load(allocator, texts + i * stride, &text);
      if (result < 0) failed = true;
      codes[i] = result == 0 ? code_of({text.data, text.size}, seed) : missing_code;
    }
  });
  numpy.release(allocator);
  if (failed) PyErr_SetString(PyExc_RuntimeError, "numpy could not read a string of values");
  return !failed;
}

}  // namespace sparsekit
