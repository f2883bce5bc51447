// What an op schema cannot carry: bulk hashing of Python objects, and facts about the build.
// The rules of hashing are stated for users in sparsekit/hashing.py.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <charconv>
#include <cstdint>
#include <string>
#include <string_view>

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
constexpr size_t kMaxDigits = 24;  // INT64_MIN and UINT64_MAX take 20 characters

// How many items ahead the next object is asked for: objects lie scattered over the heap, and the
// loop would otherwise wait for each.
constexpr Py_ssize_t kPrefetchDistance = 12;

inline void prefetch(const void* address) {
#if defined(__GNUC__)
  __builtin_prefetch(address);
#else
  (void)address;
#endif
}

std::string item_name(Py_ssize_t position) { return "values[" + std::to_string(position) + "]"; }

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

// A 0-d array or a one-element tensor has __index__ too, but it is a container: it has a length.
bool has_length(PyObject* item) {
  const PyTypeObject* type = Py_TYPE(item);
  return (type->tp_as_sequence != nullptr && type->tp_as_sequence->sq_length != nullptr) ||
         (type->tp_as_mapping != nullptr && type->tp_as_mapping->mp_length != nullptr);
}

template <class Integer>
std::string_view decimal(Integer value, char (&digits)[kMaxDigits]) {
  const char* end = std::to_chars(digits, digits + kMaxDigits, value).ptr;
  return {digits, static_cast<size_t>(end - digits)};
}

// The bytes that stand for an item. The views it returns last until its next call, or until the
// item dies.
class ItemText {
 public:
  std::string_view operator()(PyObject* item, Py_ssize_t position) {
    if (PyUnicode_Check(item)) return from_str(item, position);
    if (PyBytes_Check(item)) {
      return {PyBytes_AS_STRING(item), static_cast<size_t>(PyBytes_GET_SIZE(item))};
    }
    if (item == Py_None) return {};
    if (PyBool_Check(item)) throw_wrong_type(item, position);
    if (PyLong_Check(item)) return from_int(item, position);
    return from_index(item, position);
  }

 private:
  static std::string_view from_str(PyObject* item, Py_ssize_t position) {
    // ASCII is its own UTF-8 and lies in the object itself.
    if (PyUnicode_IS_COMPACT_ASCII(item)) {
      return {static_cast<const char*>(PyUnicode_DATA(item)),
              static_cast<size_t>(PyUnicode_GET_LENGTH(item))};
    }
    Py_ssize_t length = 0;
    const char* text = PyUnicode_AsUTF8AndSize(item, &length);
    if (text == nullptr) {
      throw_value_error(position, "a str with a lone surrogate, which has no UTF-8 form");
    }
    return {text, static_cast<size_t>(length)};
  }

  std::string_view from_int(PyObject* item, Py_ssize_t position) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow == 0) return decimal(value, digits_);
    long_digits_ = py::reinterpret_steal<py::object>(PyNumber_ToBase(item, 10));
    if (!long_digits_) {
      throw_value_error(position,
                        "an int with more digits than sys.get_int_max_str_digits() allows");
    }
    return from_str(long_digits_.ptr(), position);
  }

  // Integers that are not of Python's int, such as numpy's. May run Python code (__index__).
  std::string_view from_index(PyObject* item, Py_ssize_t position) {
    if (!PyIndex_Check(item) || has_length(item)) throw_wrong_type(item, position);
    const auto keep_alive = py::reinterpret_borrow<py::object>(item);
    const auto value = py::reinterpret_steal<py::object>(PyNumber_Index(item));
    if (!value) {
      if (PyErr_ExceptionMatches(PyExc_TypeError)) throw_wrong_type(item, position);
      throw py::error_already_set();
    }
    return from_int(value.ptr(), position);
  }

  char digits_[kMaxDigits];
  py::object long_digits_;
};

py::array_t<int64_t> xxh64_many(const py::object& values, uint64_t seed) {
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
  py::array_t<int64_t> codes(n);
  int64_t* out = codes.mutable_data();
  ItemText text_of;
  for (Py_ssize_t i = 0; i < n; ++i) {
    // An item's __index__ may have changed the list.
    if (PySequence_Fast_GET_SIZE(items.ptr()) != n) {
      throw std::runtime_error("values changed its length while it was being hashed");
    }
    PyObject** slots = PySequence_Fast_ITEMS(items.ptr());
    if (i + kPrefetchDistance < n) prefetch(slots[i + kPrefetchDistance]);
    const std::string_view text = text_of(slots[i], i);
    out[i] = static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
  }
  return codes;
}

// As xxh64_many, for an array that holds its integers itself.
template <class Integer>
py::array_t<int64_t> xxh64_integers(const py::array_t<Integer, py::array::c_style>& values,
                                    uint64_t seed) {
  if (values.ndim() != 1) throw py::value_error("values must have one dimension");
  const py::ssize_t n = values.shape(0);
  const Integer* in = values.data();
  py::array_t<int64_t> codes(n);
  int64_t* out = codes.mutable_data();
  const py::gil_scoped_release no_python_objects_below;
  char digits[kMaxDigits];
  for (py::ssize_t i = 0; i < n; ++i) {
    const std::string_view text = decimal(in[i], digits);
    out[i] = static_cast<int64_t>(xxh64(text.data(), text.size(), seed));
  }
  return codes;
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
  m.def("xxh64_many", &xxh64_many, py::arg("values"), py::arg("seed"),
        "XXH64 of each item of a sequence of str, bytes, int and None, as int64.");
  m.def("xxh64_integers", &xxh64_integers<int64_t>, py::arg("values").noconvert(), py::arg("seed"),
        "XXH64 of the decimal text of each integer of a contiguous 1-D array, as int64.");
  m.def("xxh64_integers", &xxh64_integers<uint64_t>, py::arg("values").noconvert(),
        py::arg("seed"));
  m.def("build_info", &build_info, "How this module was built, as a dict.");
}

}  // namespace
}  // namespace sparsekit
