// Hashing of columns that hold their texts themselves: Arrow's and numpy's. No Python object is
// made of any of them.
#pragma once

#include <Python.h>

#include <cstdint>
#include <string_view>
#include <vector>

namespace sparsekit {

// Of the Arrow C data interface and C stream interface, whose layout is fixed
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

// A column of Arrow in one or more chunks. Functions are called with the GIL held; those that
// return false have set a Python error.
class ArrowColumn {
 public:
  ArrowColumn() = default;
  ~ArrowColumn();
  ArrowColumn(const ArrowColumn&) = delete;
  ArrowColumn& operator=(const ArrowColumn&) = delete;

  // Takes what the capsules of __arrow_c_array__ hold. They must outlive this.
  bool open_array(PyObject* schema, PyObject* array);
  // Takes all chunks of the capsule of __arrow_c_stream__.
  bool open_stream(PyObject* stream);

  int64_t length() const;

  // codes[i] = code of item i, for i in [0, length()); nulls count as "". Lets go of the GIL.
  bool hash(uint64_t seed, int num_threads, int64_t* codes) const;

 private:
  const ArrowSchema* type_ = nullptr;
  ArrowSchema own_type_{};
  std::vector<ArrowArray> chunks_;  // with a null release: a capsule keeps it
};

// codes[i] = code of the `size` bytes at texts + i * size, without the zeros at their end. This and
// the next let go of the GIL.
bool hash_fixed_bytes(const char* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                      int num_threads, int64_t* codes);

// codes[i] = code of the UTF-8 form of the `size` code points at texts + i * size, without the
// zeros at their end. A ValueError names the position of the first that has none.
bool hash_fixed_unicode(const uint32_t* texts, Py_ssize_t size, Py_ssize_t n, uint64_t seed,
                        int num_threads, int64_t* codes);

// codes[i] = code of the packed string at texts + i * stride, of an array of numpy's StringDType
// `dtype`; `missing` stands for missing ones. Keeps the GIL: whoever else asks for the strings'
// memory meanwhile waits for its lock with the GIL held.
bool hash_numpy_strings(PyObject* dtype, const char* texts, Py_ssize_t stride, Py_ssize_t n,
                        std::string_view missing, uint64_t seed, int num_threads, int64_t* codes);

}  // namespace sparsekit
