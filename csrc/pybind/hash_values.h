// Bulk hashing of Python objects. It uses the plain Python C API: pybind11's headers take seconds
// to compile at the optimization level that these loops need.
#pragma once

#include <Python.h>

#include <cstdint>

namespace sparsekit {

// Call these functions with the GIL held. On failure they set a Python error and return null or
// false.

// Returns the items of a sequence as a list or a tuple, which is `values` itself if it is one
// already. Returns a new reference.
PyObject* sequence_items(PyObject* values);

// codes[i] = code of items[i], for the list or tuple `items` of str, bytes, int and None.
bool hash_items(PyObject* items, uint64_t seed, int num_threads, int64_t* codes);

}  // namespace sparsekit
