// Hashes Python objects. sparsekit/hashing/values.py describes the hash of each type for users.
#include "hash_values.h"

#include <algorithm>
#include <string_view>

#include "cpu/first_bad.h"
#include "hash_parts.h"
#include "sparsekit/xxh64.h"

namespace sparsekit {
namespace {

// On failure, the functions below set a Python error and return false or null. Callers propagate
// the failure.

bool refuse_type(PyObject* item, Py_ssize_t position) {
  PyErr_Format(PyExc_TypeError, "values[%zd] is of type %s; expected str, bytes, int or None",
               position, Py_TYPE(item)->tp_name);
  return false;
}

// Replaces a ValueError with one that names the position and has the original error as its cause.
// Keeps other errors, such as lack of memory or an interrupt.
bool refuse_value(Py_ssize_t position, const char* what) {
  if (!PyErr_ExceptionMatches(PyExc_ValueError)) return false;
  PyObject *type, *cause, *error, *traceback;
  PyErr_Fetch(&type, &cause, &traceback);
  PyErr_NormalizeException(&type, &cause, &traceback);
  if (traceback != nullptr) PyException_SetTraceback(cause, traceback);
  Py_XDECREF(traceback);
  Py_DECREF(type);
  PyErr_Format(PyExc_ValueError, "values[%zd] is %s", position, what);
  PyErr_Fetch(&type, &error, &traceback);
  PyErr_NormalizeException(&type, &error, &traceback);
  PyException_SetContext(error, Py_NewRef(cause));
  PyException_SetCause(error, cause);  // takes over the reference
  PyErr_Restore(type, error, traceback);
  return false;
}

// Non-ASCII strings of up to this many characters are encoded on the stack.
constexpr size_t kMostEncoded = 4096;

bool is_ready(PyObject* text) {
#if PY_VERSION_HEX < 0x030C0000
  return PyUnicode_IS_READY(text);  // false for a deprecated kind of str without code points
#else
  (void)text;
  return true;
#endif
}

// Hashes items that need neither Python code nor new objects. It only reads memory. So if one
// thread holds the GIL, several threads may read at the same time, each with its own PlainItems.
class PlainItems {
 public:
  PlainItems(uint64_t seed, int64_t* codes) : seed_(seed), codes_(codes), hasher_(seed, codes) {}

  // Hashes the items in [begin, end) up to the first item that it cannot hash. Returns the index of
  // that item, or `end`. codes[i] may be written as late as the next flush().
  Py_ssize_t add_all(PyObject* const* items, Py_ssize_t begin, Py_ssize_t end) {
    // Prefetch objects, since they are scattered over the heap.
    const auto ask_for = [=](Py_ssize_t i) {
      prefetch(items[i], 0);
      prefetch(items[i], 64);
    };
    const Py_ssize_t first = std::min(begin + kItemsAhead, end);
    for (Py_ssize_t i = begin; i < first; ++i) ask_for(i);
    for (Py_ssize_t i = begin; i < end; ++i) {
      if (i + kItemsAhead < end) ask_for(i + kItemsAhead);
      prefetch(codes_ + i, kCodesAhead * sizeof *codes_);
      if (!add(items[i], i)) return i;
    }
    return end;
  }

  // Adds one item. Returns false if the item needs Python code or new objects.
  bool add(PyObject* item, Py_ssize_t place) {
    if (PyUnicode_Check(item)) {
      // ASCII is already valid UTF-8.
      if (!PyUnicode_IS_COMPACT_ASCII(item)) return add_encoded(item, place);
      hasher_.add(static_cast<const char*>(PyUnicode_DATA(item)),
                  static_cast<size_t>(PyUnicode_GET_LENGTH(item)), place);
      return true;
    }
    if (PyBytes_Check(item)) {
      hasher_.add(PyBytes_AS_STRING(item), static_cast<size_t>(PyBytes_GET_SIZE(item)), place);
      return true;
    }
    if (item == Py_None) {
      hasher_.add(nullptr, 0, place);
      return true;
    }
    return PyLong_Check(item) && !PyBool_Check(item) && add_int(item, place);
  }

  bool add_int(PyObject* item, Py_ssize_t place) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow == 0) codes_[place] = code_of_integer(value, seed_);
    return overflow == 0;
  }

  // Hashes the added strings. Their memory must stay valid until this call returns.
  void flush() { hasher_.flush(); }

 private:
  static constexpr Py_ssize_t kItemsAhead = 64;
  static constexpr size_t kEncodedBytes = 16384;

  bool add_encoded(PyObject* item, Py_ssize_t place) {
    if (!is_ready(item)) return false;
    const auto size = static_cast<size_t>(PyUnicode_GET_LENGTH(item));
    if (size > kMostEncoded) return false;
    if (num_encoded_ > kEncodedBytes) {
      hasher_.flush();
      num_encoded_ = 0;
    }
    const void* points = PyUnicode_DATA(item);
    char* const text = encoded_ + num_encoded_;
    char* end = nullptr;
    switch (PyUnicode_KIND(item)) {
      case PyUnicode_1BYTE_KIND:
        end = put_utf8(static_cast<const uint8_t*>(points), size, text);
        break;
      case PyUnicode_2BYTE_KIND:
        end = put_utf8(static_cast<const uint16_t*>(points), size, text);
        break;
      default:
        end = put_utf8(static_cast<const uint32_t*>(points), size, text);
    }
    if (end == nullptr) return false;
    const auto length = static_cast<size_t>(end - text);
    hasher_.add(text, length, place);
    // A string of at least kTooLong bytes has been hashed immediately, so its memory can be reused.
    if (length < kTooLong) num_encoded_ += length;
    return true;
  }

  const uint64_t seed_;
  int64_t* const codes_;
  TextHasher hasher_;
  size_t num_encoded_ = 0;
  char encoded_[kEncodedBytes + kTooLong + 4 * kMostEncoded + 8];  // strings waiting in hasher_
};

bool hash_str(PyObject* item, Py_ssize_t position, uint64_t seed, int64_t* code) {
  Py_ssize_t length = 0;
  const char* text = PyUnicode_AsUTF8AndSize(item, &length);
  if (text == nullptr) {
    return refuse_value(position, "a str with a lone surrogate, which has no UTF-8 form");
  }
  *code = code_of({text, static_cast<size_t>(length)}, seed);
  return true;
}

// Hashes an int of any size.
bool hash_big_int(PyObject* item, Py_ssize_t position, uint64_t seed, int64_t* code) {
  const Reference text(PyNumber_ToBase(item, 10));
  if (!text) {
    return refuse_value(position,
                        "an int with more digits than sys.get_int_max_str_digits() allows");
  }
  return hash_str(text.get(), position, seed, code);
}

// Converts an integer of another type, such as numpy's, to a Python int. May run Python code.
PyObject* to_int(PyObject* item, Py_ssize_t position) {
  // Refuse types with len(). A 0-d array or a tensor of one element could also serve as an index,
  // and a bool tensor would then be taken for an int. Numbers do not define len().
  const PyTypeObject* type = Py_TYPE(item);
  const bool has_length = (type->tp_as_sequence && type->tp_as_sequence->sq_length) ||
                          (type->tp_as_mapping && type->tp_as_mapping->mp_length);
  PyObject* integer = nullptr;
  if (PyIndex_Check(item) && !has_length) {
    integer = PyNumber_Index(item);
    if (integer != nullptr || !PyErr_ExceptionMatches(PyExc_TypeError)) return integer;
  }
  refuse_type(item, position);
  return nullptr;
}

// Makes a tuple of the `size` items of a list. Making a tuple can trigger garbage collection, which
// may run finalizers that change the list. If the size of the list has changed, sets an error and
// returns null.
PyObject* tuple_of(PyObject* list, Py_ssize_t size) {
  PyObject* tuple = PyTuple_New(size);
  if (tuple == nullptr) return nullptr;
  if (PyList_GET_SIZE(list) != size) {
    Py_DECREF(tuple);
    PyErr_SetString(PyExc_RuntimeError, "values has changed its length while it was hashed");
    return nullptr;
  }
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyTuple_SET_ITEM(tuple, i, Py_NewRef(PyList_GET_ITEM(list, i)));
  }
  return tuple;
}

// Hashes all items starting at `first`, the first item that PlainItems could not hash.
bool hash_others(PyObject* items, Py_ssize_t first, uint64_t seed, int64_t* codes) {
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
  PlainItems plain(seed, codes);
  Reference copy;
  for (Py_ssize_t i = first; i < n; ++i) {
    PyObject* item = PySequence_Fast_GET_ITEM(items, i);
    if (plain.add(item, i)) continue;
    if (PyUnicode_Check(item)) {
      if (!hash_str(item, i, seed, &codes[i])) return false;
      continue;
    }
    if (PyBool_Check(item)) return refuse_type(item, i);
    // The code below may run Python code: a conversion or, while a long int is written in decimal,
    // a signal handler. Python code could change a list, so continue at this item with a copy of
    // the list.
    if (PyList_Check(items)) {
      plain.flush();
      copy.reset(tuple_of(items, n));
      if (!copy) return false;
      items = copy.get();
      --i;
      continue;
    }
    Reference integer;
    if (!PyLong_Check(item)) {
      integer.reset(to_int(item, i));
      if (!integer) return false;
      item = integer.get();
      if (plain.add_int(item, i)) continue;
    }
    if (!hash_big_int(item, i, seed, &codes[i])) return false;
  }
  plain.flush();
  return true;
}

}  // namespace

PyObject* sequence_items(PyObject* values) {
  // Refuse sets and dicts: they can be iterated, but their order has no meaning.
  if (PySequence_Check(values)) return PySequence_Fast(values, "values must be a sequence");
  return PyErr_Format(PyExc_TypeError, "values must be a sequence, such as a list; got %s",
                      Py_TYPE(values)->tp_name);
}

bool hash_items(PyObject* items, uint64_t seed, int num_threads, int64_t* codes) {
  PyObject* const* slots = PySequence_Fast_ITEMS(items);
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(items);
  cpu::FirstBad bad;  // items that PlainItems cannot hash
  // This thread keeps the GIL while others are reading, so no object can change.
  share(n, num_threads, [=, &bad](Chunks& chunks) {
    PlainItems plain(seed, codes);
    for (int64_t begin = 0, end = 0; chunks.next(&begin, &end);) {
      const Py_ssize_t left = plain.add_all(slots, begin, end);
      if (left < end) bad.report(left);
    }
    plain.flush();
  });
  return bad.position() < 0 || hash_others(items, bad.position(), seed, codes);
}

}  // namespace sparsekit
