// Bulk hashing of Python objects. On the plain Python C API: pybind11's headers
// take seconds to compile at the optimization level that these loops want.
#pragma once

#include <Python.h>

#include <cstdint>

namespace sparsekit {

// All of these are called with the GIL held. What fails returns null or false, with a Python error
// set.

// The items of a sequence as a list or a tuple, which is `values` itself if it is one already. A
// new reference.
PyObject* sequence_items(PyObject* values);

// codes[i] = code of items[i], for the list or tuple `items` of str, bytes, int and None.
bool hash_items(PyObject* items, uint64_t seed, int num_threads, int64_t* codes);

}  // namespace sparsekit
