// All-to-all through memory that ranks share, for Python. Only the .cpp includes pybind11, which
// takes seconds to compile.
#pragma once

namespace pybind11 {
class module_;
}

namespace sparsekit {

// Adds the class SharedMemoryCommunicator.
void add_shared_memory(pybind11::module_& module);

}  // namespace sparsekit
