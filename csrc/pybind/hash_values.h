// Hashes whole sequences of Python objects, and whole Arrow and numpy columns. The items of a
// column are not converted to Python objects. The code uses the plain Python C API: pybind11's
// headers take seconds to compile at the optimization level that these loops need.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace sparsekit {

// Call the functions below with the GIL held and num_threads >= 1. On failure, they set a Python
// error and return null or false.

// Returns a new reference to a list or tuple with the items of a sequence. A list or tuple is
// returned as is.
PyObject* sequence_items(PyObject* values);

// Sets codes[i] to the code of items[i], for a list or tuple of str, bytes, int and None.
bool hash_items(PyObject* items, uint64_t seed, int num_threads, int64_t* codes);

// Structs of the Arrow C data interface and the Arrow C stream interface. Their layout is fixed
// (arrow.apache.org/docs/format/CDataInterface.html).
struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata;
  int64_t flags;
  int64_t n_children;
  ArrowSchema** children;
  ArrowSchema* dictionary;
  void (*release)(ArrowSchema*);
  void* private_data;
};

struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  ArrowArray** children;
  ArrowArray* dictionary;
  void (*release)(ArrowArray*);
  void* private_data;
};

struct ArrowArrayStream {
  int (*get_schema)(ArrowArrayStream*, ArrowSchema* out);
  int (*get_next)(ArrowArrayStream*, ArrowArray* out);
  const char* (*get_last_error)(ArrowArrayStream*);
  void (*release)(ArrowArrayStream*);
  void* private_data;
};

// An Arrow column in one or more chunks.
class ArrowColumn {
 public:
  ArrowColumn() = default;
  ~ArrowColumn();
  ArrowColumn(const ArrowColumn&) = delete;
  ArrowColumn& operator=(const ArrowColumn&) = delete;

  // Opens the array in the two capsules that __arrow_c_array__ returned. The capsules must outlive
  // this object.
  bool open_array(PyObject* schema, PyObject* array);
  // Opens all chunks of the stream in the capsule that __arrow_c_stream__ returned, and takes
  // ownership of the chunks.
  bool open_stream(PyObject* stream);

  int64_t length() const;

  // Sets codes[i] to the code of item i, for i in [0, length()). A null item has the code of "".
  // Releases the GIL.
  bool hash(uint64_t seed, int num_threads, int64_t* codes) const;

 private:
  const ArrowSchema* type_ = nullptr;
  ArrowSchema own_type_{};
  std::vector<ArrowArray> chunks_;  // `release` is null if a capsule owns the chunk
};

// Sets codes[i] to the code of the `size` bytes at texts + i * size, without trailing zeros. Both
// this function and hash_fixed_unicode release the GIL.
bool hash_fixed_bytes(const char* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                      int num_threads, int64_t* codes);

// Sets codes[i] to the code of the UTF-8 encoding of the `size` code points at texts + i * size,
// without trailing zeros. If a string has no UTF-8 encoding, sets a ValueError that names the first
// one.
bool hash_fixed_unicode(const uint32_t* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                        int num_threads, int64_t* codes);

// Sets codes[i] to the code of the packed string at texts + i * stride. `dtype` is the StringDType
// of the array, and `missing` is the code of missing strings. Keeps the GIL: other threads hold it
// while they wait for the lock on the strings' memory, so releasing it here could cause a deadlock.
bool hash_numpy_strings(PyObject* dtype, const char* texts, Py_ssize_t stride, Py_ssize_t n,
                        std::string_view missing, uint64_t seed, int num_threads, int64_t* codes);

}  // namespace sparsekit
