// A communicator of libnccl that Python owns. Only the .cpp includes pybind11, which takes seconds
// to compile.
#pragma once

namespace pybind11 {
class module_;
}

namespace sparsekit {

// Adds the class NcclCommunicator.
void add_nccl_communicator(pybind11::module_& module);

// Returns the version of the nccl.h that this was built with.
const char* nccl_version();

}  // namespace sparsekit
