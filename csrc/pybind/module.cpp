// What an op schema cannot carry: bulk hashing of Python objects, and facts about the build.
// The rules of hashing are stated for users in sparsekit/hashing.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstdint>
#include <future>
#include <string>
#include <string_view>
#include <vector>

#include "sparsekit/xxh64.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#elif defined(__GNUC__)
constexpr const char* kCompiler = "GCC " __VERSION__;
#else
constexpr const char* kCompiler = "unknown";
#endif

constexpr const char* kTorchMinimum = "2.11";

// Below this many values for each, threads cost more than they save.
constexpr Py_ssize_t kGrain = 32768;

// How many items ahead an object is asked for: objects lie scattered over the heap, and the loop
// would otherwise wait for each.
constexpr Py_ssize_t kPrefetchDistance = 16;

inline void prefetch_object(const PyObject* item) {
#if defined(__GNUC__)
  const char* address = reinterpret_cast<const char*>(item);
  __builtin_prefetch(address);
  __builtin_prefetch(address + 48);  // the text of a short str, often on the next line
#else
  (void)item;
#endif
}

// Calls body(begin, end) for up to num_threads parts of [0, n), the first in this thread.
template <class Body>
void split(Py_ssize_t n, int num_threads, const Body& body) {
  if (num_threads < 1) throw py::value_error("num_threads must be positive");
  const Py_ssize_t parts = std::clamp<Py_ssize_t>(n / kGrain, 1, num_threads);
  std::vector<std::future<void>> others;
  for (Py_ssize_t part = 1; part < parts; ++part) {
    others.push_back(
        std::async(std::launch::async, body, n * part / parts, n * (part + 1) / parts));
  }
  body(0, n / parts);
  for (auto& other : others) other.get();
}

int64_t code_of(std::string_view text, uint64_t seed) {
  return static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
}

// Hashes the decimal text of integers, a batch at a time: read back at once, digits that were
// written in small pieces would stall the loads of the hash.
class DecimalHasher {
 public:
  explicit DecimalHasher(uint64_t seed) : seed_(seed) {}

  // *code is written at the latest by flush().
  template <class Integer>
  void add(Integer value, int64_t* code) {
    if (count_ == kBatch) flush();
    char* digits = digits_[count_];
    length_[count_] =
        static_cast<size_t>(std::to_chars(digits, digits + sizeof digits_[0], value).ptr - digits);
    code_[count_++] = code;
  }

  void flush() {
    for (int i = 0; i < count_; ++i) *code_[i] = code_of({digits_[i], length_[i]}, seed_);
    count_ = 0;
  }

 private:
  static constexpr int kBatch = 32;

  uint64_t seed_;
  int count_ = 0;
  char digits_[kBatch][24];  // INT64_MIN and UINT64_MAX take 20 characters
  size_t length_[kBatch];
  int64_t* code_[kBatch];
};

std::string item_name(Py_ssize_t position) {
  return "values[" + std::to_string(position) + "]";
}

[[noreturn]] void throw_wrong_type(PyObject* item, Py_ssize_t position) {
  PyErr_Clear();
  throw py::type_error(item_name(position) + " is of type " + Py_TYPE(item)->tp_name +
                       "; expected str, bytes, int or None");
}

// Turns the Python error now set into a ValueError that names the position. Anything that is not a
// ValueError (a lack of memory, an interrupt) passes unchanged.
[[noreturn]] void throw_value_error(Py_ssize_t position, const char* what) {
  if (PyErr_ExceptionMatches(PyExc_ValueError)) {
    py::raise_from(PyExc_ValueError, (item_name(position) + " is " + what).c_str());
  }
  throw py::error_already_set();
}

// The bytes to hash of an item that holds them as they are; false if it is not such an item.
// Only reads memory, so any thread may call it while some thread holds the GIL.
inline bool plain_text(PyObject* item, std::string_view* text) {
  if (PyUnicode_Check(item)) {
    // ASCII is its own UTF-8.
    if (!PyUnicode_IS_COMPACT_ASCII(item)) return false;
    *text = {static_cast<const char*>(PyUnicode_DATA(item)),
             static_cast<size_t>(PyUnicode_GET_LENGTH(item))};
    return true;
  }
  if (PyBytes_Check(item)) {
    *text = {PyBytes_AS_STRING(item), static_cast<size_t>(PyBytes_GET_SIZE(item))};
    return true;
  }
  *text = {};
  return item == Py_None;
}

std::string_view utf8(PyObject* item, Py_ssize_t position) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(item, &length);
  if (text == nullptr) {
    throw_value_error(position, "a str with a lone surrogate, which has no UTF-8 form");
  }
  return {text, static_cast<size_t>(length)};
}

py::object decimal_text(PyObject* integer, Py_ssize_t position) {
  auto text = py::reinterpret_steal<py::object>(PyNumber_ToBase(integer, 10));
  if (!text) {
    throw_value_error(position, "an int with more digits than sys.get_int_max_str_digits() allows");
  }
  return text;
}

// The int that an integer of another type stands for, numpy's for one. May run Python code.
py::object to_int(PyObject* item, Py_ssize_t position) {
  // A 0-d array or a tensor of one element can be an index too, but unlike numbers they define
  // len(), and a bool tensor would pass for an int.
  const PyTypeObject* type = Py_TYPE(item);
  const bool has_length = (type->tp_as_sequence && type->tp_as_sequence->sq_length) ||
                          (type->tp_as_mapping && type->tp_as_mapping->mp_length);
  if (!PyIndex_Check(item) || has_length) throw_wrong_type(item, position);
  auto value = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!value) {
    if (PyErr_ExceptionMatches(PyExc_TypeError)) throw_wrong_type(item, position);
    throw py::error_already_set();
  }
  return value;
}

// codes[i] for the items that hash_plain() leaves out. `items` is a list or a tuple.
void hash_others(py::object items, uint64_t seed, int64_t* codes) {
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(items.ptr());
  DecimalHasher decimals(seed);
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items.ptr(), i);
    std::string_view text;
    if (plain_text(item, &text)) continue;
    if (PyUnicode_Check(item)) {
      codes[i] = code_of(utf8(item, i), seed);
      continue;
    }
    if (PyBool_Check(item)) throw_wrong_type(item, i);
    py::object integer;
    if (!PyLong_Check(item)) {
      // Python code could change a list, so go on with a copy. A tuple is its own copy.
      items = py::reinterpret_steal<py::object>(PySequence_Tuple(items.ptr()));
      if (!items) throw py::error_already_set();
      integer = to_int(item, i);
      item = integer.ptr();
    }
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow == 0) {
      decimals.add(value, &codes[i]);
    } else {
      codes[i] = code_of(utf8(decimal_text(item, i).ptr(), i), seed);
    }
  }
  decimals.flush();
}

py::array_t<int64_t> xxh64_many(const py::object& values, uint64_t seed, int num_threads) {
  // Sets and dicts can be iterated too, but the order of their codes would mean nothing.
  if (!PySequence_Check(values.ptr())) {
    throw py::type_error(std::string("values must be a sequence, such as a list; got ") +
                         Py_TYPE(values.ptr())->tp_name);
  }
  // The list or tuple itself, or a list of the items of any other sequence.
  const auto items =
      py::reinterpret_steal<py::object>(PySequence_Fast(values.ptr(), "values must be a sequence"));
  if (!items) throw py::error_already_set();

  const Py_ssize_t n = PySequence_Fast_GET_SIZE(items.ptr());
  PyObject* const* slots = PySequence_Fast_ITEMS(items.ptr());
  py::array_t<int64_t> result(n);
  int64_t* codes = result.mutable_data();
  std::atomic<bool> all_plain{true};
  // This thread keeps the GIL and waits, so nothing changes while the others read.
  split(n, num_threads, [=, &all_plain](Py_ssize_t begin, Py_ssize_t end) {
    for (Py_ssize_t i = begin; i < end; ++i) {
      if (i + kPrefetchDistance < end) prefetch_object(slots[i + kPrefetchDistance]);
      std::string_view text;
      if (plain_text(slots[i], &text)) {
        codes[i] = code_of(text, seed);
      } else {
        all_plain.store(false, std::memory_order_relaxed);
      }
    }
  });
  if (!all_plain) hash_others(items, seed, codes);
  return result;
}

// As xxh64_many, for an array that holds its integers itself.
template <class Integer>
py::array_t<int64_t> xxh64_integers(const py::array_t<Integer, py::array::c_style>& values,
                                    uint64_t seed, int num_threads) {
  if (values.ndim() != 1) throw py::value_error("values must have one dimension");
  const Py_ssize_t n = values.shape(0);
  const Integer* in = values.data();
  py::array_t<int64_t> result(n);
  int64_t* codes = result.mutable_data();
  const py::gil_scoped_release no_python_below;
  split(n, num_threads, [=](Py_ssize_t begin, Py_ssize_t end) {
    DecimalHasher decimals(seed);
    for (Py_ssize_t i = begin; i < end; ++i) decimals.add(in[i], &codes[i]);
    decimals.flush();
  });
  return result;
}

py::dict build_info() {
  py::dict info;
  info["version"] = SPARSEKIT_VERSION;
  info["compiler"] = kCompiler;
  info["cxx_standard"] = static_cast<int>(__cplusplus / 100 % 100);
  info["torch_built_with"] = SPARSEKIT_TORCH_VERSION;
  info["torch_minimum"] = kTorchMinimum;
  info["build_type"] = SPARSEKIT_BUILD_TYPE;
  info["python"] = PY_VERSION;
  info["cuda"] = static_cast<bool>(SPARSEKIT_WITH_CUDA);
  return info;
}

PYBIND11_MODULE(_pybind, m) {
  m.doc() = "Bulk hashing of Python objects, and facts about this build.";
  m.def("xxh64_many", &xxh64_many, py::arg("values"), py::arg("seed"), py::arg("num_threads") = 1,
        "XXH64 of each item of a sequence of str, bytes, int and None, as int64.");
  m.def("xxh64_integers", &xxh64_integers<int64_t>, py::arg("values").noconvert(), py::arg("seed"),
        py::arg("num_threads") = 1,
        "XXH64 of the decimal text of each integer of a contiguous 1-D array, as int64.");
  m.def("xxh64_integers", &xxh64_integers<uint64_t>, py::arg("values").noconvert(), py::arg("seed"),
        py::arg("num_threads") = 1);
  m.def("build_info", &build_info, "How this module was built, as a dict.");
}

}  // namespace
}  // namespace sparsekit
