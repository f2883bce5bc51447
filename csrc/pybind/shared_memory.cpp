#include <pybind11/stl.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings.h"
#include "shared_memory_communicator.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

using shared_memory::Communicator;
using shared_memory::Segment;

class SharedMemoryCommunicator {
 public:
  SharedMemoryCommunicator(int rank, int world_size, int file, const std::vector<int>& sockets,
                           double seconds)
      : communicator_(rank, world_size, std::make_shared<Segment>(file, world_size), sockets,
                      seconds) {}

  // Begins a collective and returns its number. Keeps `keep`, which owns the collective's memory,
  // alive until the collective is completed, even if the caller never waits.
  uint64_t begin(uintptr_t send, const std::vector<int64_t>& send_bytes, uintptr_t receive,
                 const std::vector<int64_t>& receive_bytes, py::object keep) {
    let_go();
    uint64_t number = 0;
    {
      const py::gil_scoped_release no_gil;
      number = communicator_.begin(reinterpret_cast<const char*>(send), send_bytes,
                                   reinterpret_cast<char*>(receive), receive_bytes);
    }
    kept_.emplace_back(number, std::move(keep));
    return number;
  }

  void wait(uint64_t number) {
    const auto deadline = communicator_.deadline();
    for (;;) {
      {
        const py::gil_scoped_release no_gil;
        if (communicator_.work_on(number, deadline)) break;
      }
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
    let_go();
  }

  void close(const std::string& reason) {
    {
      const py::gil_scoped_release no_gil;
      communicator_.close(reason);
    }
    kept_.clear();
  }

 private:
  void let_go() {
    const uint64_t completed = communicator_.completed();
    while (!kept_.empty() && kept_.front().first < completed) {
      const py::object last = std::move(kept_.front().second);  // its destructor may run Python
      kept_.pop_front();
    }
  }

  std::deque<std::pair<uint64_t, py::object>> kept_;  // destroyed after communicator_
  Communicator communicator_;
};

std::unique_ptr<SharedMemoryCommunicator> connect(int rank, int world_size, int file,
                                                  const std::vector<int>& sockets, double seconds) {
  if (rank < 0 || rank >= world_size || sockets.size() != static_cast<size_t>(world_size)) {
    throw std::invalid_argument("rank must be one of world_size, with a socket for each");
  }
  try {
    return std::make_unique<SharedMemoryCommunicator>(rank, world_size, file, sockets, seconds);
  } catch (const std::system_error& error) {
    const py::object arguments = py::make_tuple(error.code().value(), error.what());
    PyErr_SetObject(PyExc_OSError, arguments.ptr());
    throw py::error_already_set();
  }
}

}  // namespace

void add_shared_memory(py::module_& module) {
  using Class = SharedMemoryCommunicator;
  py::class_<Class>(module, "SharedMemoryCommunicator",
                    "All-to-all of bytes between the processes of one host.")
      .def(py::init(&connect), py::arg("rank"), py::arg("world_size"), py::arg("file"),
           py::arg("sockets"), py::arg("seconds"),
           "Map the file, which must have total_bytes. `sockets` has a connected socket for each "
           "rank; it is duplicated.")
      .def("begin", &Class::begin, py::arg("send"), py::arg("send_bytes"), py::arg("receive"),
           py::arg("receive_bytes"), py::arg("keep"),
           "Begin a collective and return its number. `keep` owns the memory.")
      .def("wait", &Class::wait, py::arg("number"), "Wait for a collective, at most `seconds`.")
      .def("close", &Class::close, py::arg("reason"),
           "Leave; waits of the other ranks raise with the reason.")
      .def_static("total_bytes", &Segment::total_bytes, py::arg("world_size"),
                  "Return the size in bytes of the file that this many ranks share.");
}

}  // namespace sparsekit
