#include "nccl_communicator.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "sparsekit/nccl_exchange.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

// At most one thread at a time is in a call, so that one may abort what another one uses.
class NcclCommunicator {
 public:
  NcclCommunicator(int rank, int world_size, const std::string& unique_id, double seconds)
      : world_size_(world_size), seconds_(seconds) {
    nccl::UniqueId id{};
    if (unique_id.size() != id.size()) {
      throw std::invalid_argument("unique_id must have " + std::to_string(id.size()) +
                                  " bytes, got " + std::to_string(unique_id.size()));
    }
    std::copy(unique_id.begin(), unique_id.end(), id.begin());
    communicator_ = nccl::connect(rank, world_size, id, seconds);
  }

  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Nobody has destroyed it, so the other ranks may not be about to do so either.
  ~NcclCommunicator() { nccl::abort(communicator_); }

  void all_to_all(uintptr_t send, const std::vector<int64_t>& send_bytes, uintptr_t receive,
                  const std::vector<int64_t>& receive_bytes, uintptr_t stream) {
    check_sizes("send_bytes", send_bytes);
    check_sizes("receive_bytes", receive_bytes);
    use([&](ncclComm* communicator) {
      nccl::all_to_all(communicator, world_size_, reinterpret_cast<const void*>(send),
                       send_bytes.data(), reinterpret_cast<void*>(receive), receive_bytes.data(),
                       reinterpret_cast<void*>(stream), seconds_);
    });
  }

  void check() { use(nccl::check); }

  void abort(const std::string& reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (communicator_ != nullptr) let_go(reason);
  }

  void destroy(double seconds) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (communicator_ == nullptr) return;
    ncclComm* communicator = communicator_;
    communicator_ = nullptr;
    gone_ = "it has been destroyed";
    nccl::disconnect(communicator, seconds);
  }

 private:
  void check_sizes(const char* argument, const std::vector<int64_t>& bytes) const {
    if (bytes.size() != static_cast<size_t>(world_size_)) {
      throw std::invalid_argument(std::string(argument) + " must have a size for each of " +
                                  std::to_string(world_size_) + " ranks, got " +
                                  std::to_string(bytes.size()));
    }
    if (std::any_of(bytes.begin(), bytes.end(), [](int64_t size) { return size < 0; })) {
      throw std::invalid_argument(std::string(argument) + " must not be negative");
    }
  }

  template <typename Function>
  void use(const Function& function) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (communicator_ == nullptr) {
      throw std::runtime_error("sparsekit: the NCCL communicator is no more: " + gone_);
    }
    try {
      function(communicator_);
    } catch (const std::exception& error) {
      let_go(error.what());
      throw;
    }
  }

  void let_go(const std::string& reason) {
    gone_ = reason;
    nccl::abort(communicator_);
    communicator_ = nullptr;
  }

  const int world_size_;
  const double seconds_;
  std::mutex mutex_;
  ncclComm* communicator_ = nullptr;
  std::string gone_;
};

}  // namespace

const char* nccl_version() {
  return nccl::header_version();
}

void add_nccl_communicator(py::module_& module) {
  // Python goes on while a call waits: the other threads are how a rank learns what is wrong.
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<NcclCommunicator>(module, "NcclCommunicator",
                               "A communicator of libnccl on the current CUDA device.")
      .def(py::init<int, int, const std::string&, double>(), py::arg("rank"), py::arg("world_size"),
           py::arg("unique_id"), py::arg("seconds"), no_gil,
           "Waits for all ranks, and here and later for at most so many seconds.")
      .def("all_to_all", &NcclCommunicator::all_to_all, py::arg("send"), py::arg("send_bytes"),
           py::arg("receive"), py::arg("receive_bytes"), py::arg("stream"), no_gil,
           "Send bytes to each rank and receive from each, in the order of the stream.")
      .def("check", &NcclCommunicator::check, no_gil,
           "Raise if something has gone wrong since the last call.")
      .def("abort", &NcclCommunicator::abort, py::arg("reason"), no_gil,
           "Free it at once, also on the device; later calls raise with the reason.")
      .def("destroy", &NcclCommunicator::destroy, py::arg("seconds"), no_gil,
           "Wait for what is under way, then free it.")
      .def_static("library_version", &nccl::library_version,
                  "Version of the libnccl that is used, such as 23007.")
      .def_static(
          "unique_id",
          [] {
            const nccl::UniqueId id = nccl::unique_id();
            return py::bytes(id.data(), id.size());
          },
          "What all ranks of a new communicator must be given.");
}

}  // namespace sparsekit
