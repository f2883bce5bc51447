// What an op schema cannot carry: bulk hashing of Python objects, communicators of NCCL and through
// shared memory, and facts about the build. Only the glue to Python is here, which is slow to
// compile; the work is in hash_values.cpp. For the same reason arrays are buffers here, without
// pybind11/numpy.h.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

#include "hash_values.h"
#include "shared_memory.h"
#ifdef SPARSEKIT_NCCL
#include "nccl_communicator.h"
#endif

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

// numpy.empty, looked up when this module is loaded: later, an import hook could run.
py::handle numpy_empty;

py::buffer int64_array(Py_ssize_t size) {
  return numpy_empty(size, "int64");
}

py::buffer xxh64_many(const py::object& values, uint64_t seed, int num_threads) {
  const auto items = py::reinterpret_steal<py::object>(sequence_items(values.ptr()));
  if (!items) throw py::error_already_set();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(items.ptr());
  py::buffer codes = int64_array(size);
  if (PySequence_Fast_GET_SIZE(items.ptr()) != size) {  // by a finalizer, if garbage was collected
    throw std::runtime_error("values has changed its length while it was hashed");
  }
  const py::buffer_info out = codes.request(true);
  if (!hash_items(items.ptr(), seed, num_threads, static_cast<int64_t*>(out.ptr))) {
    throw py::error_already_set();
  }
  return codes;
}

// As xxh64_many, for an array that holds its integers itself.
py::buffer xxh64_integers(const py::buffer& values, uint64_t seed, int num_threads) {
  const py::buffer_info in = values.request();
  if (in.ndim != 1) throw py::value_error("values must have one dimension");
  if (in.strides[0] != in.itemsize) throw py::value_error("values must be contiguous");
  py::buffer codes = int64_array(in.size);
  const py::buffer_info out = codes.request(true);
  const auto hash = [&](const auto* integers) {
    return hash_integers(integers, in.size, seed, num_threads, static_cast<int64_t*>(out.ptr));
  };
  bool done = false;
  if (in.item_type_is_equivalent_to<int64_t>()) {
    done = hash(static_cast<const int64_t*>(in.ptr));
  } else if (in.item_type_is_equivalent_to<uint64_t>()) {
    done = hash(static_cast<const uint64_t*>(in.ptr));
  } else {
    throw py::type_error("values must be of dtype int64 or uint64");
  }
  if (!done) throw py::error_already_set();
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
  m.doc() = "Bulk hashing of Python objects, and facts about this build.";
  m.def("xxh64_many", &xxh64_many, py::arg("values"), py::arg("seed"), py::arg("num_threads") = 1,
        "XXH64 of each item of a sequence of str, bytes, int and None, as int64.");
  m.def("xxh64_integers", &xxh64_integers, py::arg("values"), py::arg("seed"),
        py::arg("num_threads") = 1,
        "XXH64 of the decimal text of each integer of a contiguous 1-D array, as int64.");
  m.def("build_info", &build_info, "How this module was built, as a dict.");
  add_shared_memory(m);
#ifdef SPARSEKIT_NCCL
  add_nccl_communicator(m);
#endif
}

}  // namespace
}  // namespace sparsekit
