// Functions for Python that cannot be torch ops: hashing values, parsing text, communicating over
// NCCL and shared memory, checking many objects, and describing the build. This file has only the
// bindings, since pybind11 is slow to compile; the work is done in hash_values.cpp and other files.
// For the same reason, arrays are passed as buffers, without pybind11/numpy.h.
#include <cstdint>
#include <stdexcept>

#include "bindings.h"
#include "hash_values.h"
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

// Makes an array of n codes and calls fill(codes). `fill` must set a Python error if it returns
// false.
template <class Fill>
py::buffer codes_of(Py_ssize_t n, int num_threads, const Fill& fill) {
  if (num_threads < 1) throw py::value_error("num_threads must be positive");
  py::buffer codes = numpy_empty(n, "int64");
  if (!fill(static_cast<int64_t*>(codes.request(true).ptr))) throw py::error_already_set();
  return codes;
}

py::buffer xxh64_many(const py::object& values, uint64_t seed, int num_threads) {
  const auto items = py::reinterpret_steal<py::object>(sequence_items(values.ptr()));
  if (!items) throw py::error_already_set();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
  return codes_of(size, num_threads, [&](int64_t* codes) {
    // Check the size again: garbage collection may have run a finalizer that changed the sequence.
    if (PySequence_Fast_GET_SIZE(items.ptr()) != size) {
      throw std::runtime_error("values has changed its length while it was hashed");
    }
    return hash_items(items.ptr(), seed, num_threads, codes);
  });
}

py::buffer xxh64_of_column(const ArrowColumn& column, uint64_t seed, int num_threads) {
  return codes_of(column.length(), num_threads,
                  [&](int64_t* codes) { return column.hash(seed, num_threads, codes); });
}

py::buffer xxh64_arrow(const py::capsule& schema, const py::capsule& array, uint64_t seed,
                       int num_threads) {
  ArrowColumn column;
  if (!column.open_array(schema.ptr(), array.ptr())) throw py::error_already_set();
  return xxh64_of_column(column, seed, num_threads);
}

py::buffer xxh64_arrow_stream(const py::capsule& stream, uint64_t seed, int num_threads) {
  ArrowColumn column;
  if (!column.open_stream(stream.ptr())) throw py::error_already_set();
  return xxh64_of_column(column, seed, num_threads);
}

// The following functions take arrays by address, since numpy cannot export all of them as buffers.
// The caller must keep the arrays alive.
py::buffer xxh64_fixed_width(uintptr_t texts, Py_ssize_t size, bool unicode, Py_ssize_t n,
                             uint64_t seed, int num_threads) {
  return codes_of(n, num_threads, [&](int64_t* codes) {
    return unicode ? hash_fixed_unicode(reinterpret_cast<const uint32_t*>(texts), size, n, seed,
                                        num_threads, codes)
                   : hash_fixed_bytes(reinterpret_cast<const char*>(texts), size, n, seed,
                                      num_threads, codes);
  });
}

py::buffer xxh64_numpy_strings(const py::object& dtype, uintptr_t texts, Py_ssize_t stride,
                               Py_ssize_t n, const py::bytes& missing, uint64_t seed,
                               int num_threads) {
  return codes_of(n, num_threads, [&](int64_t* codes) {
    return hash_numpy_strings(dtype.ptr(), reinterpret_cast<const char*>(texts), stride, n,
                              std::string_view(missing), seed, num_threads, codes);
  });
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
  info["cuda"] = *SPARSEKIT_CUDA_ARCHS != 0;
  info["cuda_archs"] = SPARSEKIT_CUDA_ARCHS;
#ifdef SPARSEKIT_NCCL
  info["nccl"] = nccl_version();
#else
  info["nccl"] = false;
#endif
  return info;
}

PYBIND11_MODULE(_pybind, m) {
  numpy_empty = py::object(py::module_::import("numpy").attr("empty")).release();
  m.doc() = "Bulk hashing of values, and facts about this build.";
  m.def("xxh64_many", &xxh64_many, py::arg("values"), py::arg("seed"), py::arg("num_threads") = 1,
        "Return the XXH64 of each item of a sequence of str, bytes, int and None, as int64.");
  m.def("xxh64_arrow", &xxh64_arrow, py::arg("schema"), py::arg("array"), py::arg("seed"),
        py::arg("num_threads") = 1,
        "Return the XXH64 of each item of the array from __arrow_c_array__, as int64.");
  m.def("xxh64_arrow_stream", &xxh64_arrow_stream, py::arg("stream"), py::arg("seed"),
        py::arg("num_threads") = 1,
        "Return the XXH64 of each item of the stream from __arrow_c_stream__, as int64.");
  m.def("xxh64_fixed_width", &xxh64_fixed_width, py::arg("texts"), py::arg("size"),
        py::arg("unicode"), py::arg("n"), py::arg("seed"), py::arg("num_threads") = 1,
        "Return the XXH64 of n texts of `size` bytes or code points, without trailing zeros.");
  m.def("xxh64_numpy_strings", &xxh64_numpy_strings, py::arg("dtype"), py::arg("texts"),
        py::arg("stride"), py::arg("n"), py::arg("missing"), py::arg("seed"),
        py::arg("num_threads") = 1,
        "Return the XXH64 of n packed strings of numpy's StringDType; `missing` replaces missing "
        "ones.");
  m.def(
      "use_xxh64_engine", &use_xxh64_engine, py::arg("wanted"),
      "Hash short texts with \"avx512\", \"avx2\" or \"portable\", or with the next of these that "
      "the processor has; for tests. Return the name of the selected engine.");
  m.def("build_info", &build_info, "Return how this module was built, as a dict.");
  add_delimited_text(m);
  add_row_bounds(m);
  add_shared_memory(m);
  add_unchanged(m);
#ifdef SPARSEKIT_NCCL
  add_nccl_communicator(m);
#endif
}

}  // namespace
}  // namespace sparsekit
