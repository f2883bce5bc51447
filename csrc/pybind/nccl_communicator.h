// A communicator of libnccl that Python owns. On pybind11, which takes seconds to compile, is only
// what is in the .cpp.
#pragma once

namespace pybind11 {
class module_;
}

namespace sparsekit {

// Adds the class NcclCommunicator.
void add_nccl_communicator(pybind11::module_& module);

// Version of the nccl.h that this was built with.
const char* nccl_version();

}  // namespace sparsekit
