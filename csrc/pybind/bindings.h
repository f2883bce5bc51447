// Functions that each add a part to the module. The function add_x is defined in x.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace sparsekit {

// numpy.empty, looked up when this module is loaded. A later lookup could run an import hook.
inline pybind11::handle numpy_empty;

void add_delimited_text(pybind11::module_& module);  // TextField, TextFormat, TextLines, skip_line
void add_row_bounds(pybind11::module_& module);      // RowBound, RowBounds
void add_shared_memory(pybind11::module_& module);   // SharedMemoryCommunicator
void add_unchanged(pybind11::module_& module);       // TensorPlaces, dict_has and others
void add_nccl_communicator(pybind11::module_& module);  // NcclCommunicator

// Returns the version of the nccl.h used for the build.
const char* nccl_version();

}  // namespace sparsekit
