#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "sparsekit/nccl_exchange.h"

namespace py = pybind11;

namespace sparsekit {
namespace {

// Maximum time that abort() waits for another thread's call to stop.
constexpr std::chrono::seconds kPatience{10};

// A communicator whose errors any thread can check. Only one thread at a time may send. During such
// a call, other threads may check for errors and abort the call.
class NcclCommunicator {
 public:
  NcclCommunicator(int rank, int world_size, const std::string& unique_id)
      : world_size_(world_size) {
    nccl::UniqueId id{};
    if (unique_id.size() != id.size()) {
      throw std::invalid_argument("unique_id must have " + std::to_string(id.size()) +
                                  " bytes, got " + std::to_string(unique_id.size()));
    }
    std::copy(unique_id.begin(), unique_id.end(), id.begin());
    communicator_ = nccl::connect(rank, world_size, id);
  }

  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // Abort without waiting for other ranks: if destroy() was not called, they may not be
  // disconnecting.
  ~NcclCommunicator() { nccl::abort(communicator_); }

  void all_to_all(uintptr_t send, const std::vector<int64_t>& send_bytes, uintptr_t receive,
                  const std::vector<int64_t>& receive_bytes, uintptr_t stream) {
    check_sizes("send_bytes", send_bytes);
    check_sizes("receive_bytes", receive_bytes);
    const std::lock_guard<std::mutex> alone(calls_);
    std::unique_lock<std::mutex> lock(state_);
    ncclComm* communicator = present();
    calling_ = true;
    lock.unlock();
    std::string failure;
    try {
      nccl::all_to_all(communicator, world_size_, reinterpret_cast<const void*>(send),
                       send_bytes.data(), reinterpret_cast<void*>(receive), receive_bytes.data(),
                       reinterpret_cast<void*>(stream));
    } catch (const std::exception& error) {
      failure = error.what();
    }
    lock.lock();
    calling_ = false;
    returned_.notify_all();
    // If another thread has aborted the communicator in the meantime, present() throws the reason
    // for that abort.
    present();
    if (failure.empty()) return;
    lock.unlock();
    abort(failure);
    throw std::runtime_error(failure);
  }

  void check() {
    std::string failure;
    try {
      const std::lock_guard<std::mutex> lock(state_);
      nccl::check(present());
      return;
    } catch (const std::exception& error) {
      failure = error.what();
    }
    abort(failure);  // does nothing if the communicator is already gone
    throw std::runtime_error(failure);
  }

  void abort(const std::string& reason) {
    std::unique_lock<std::mutex> lock(state_);
    ncclComm* communicator = take(reason);
    if (communicator == nullptr) return;
    if (calling_) {
      // NCCL would free the communicator while another thread's call is still using it, so stop
      // that call first. An old library cannot stop a call; in that case only abort, like torch's
      // watchdog.
      lock.unlock();
      const bool stopped = nccl::revoke(communicator);
      lock.lock();
      if (stopped) returned_.wait_for(lock, kPatience, [&] { return !calling_; });
    }
    lock.unlock();
    nccl::abort(communicator);
  }

  void destroy() {
    const std::lock_guard<std::mutex> alone(calls_);
    std::unique_lock<std::mutex> lock(state_);
    ncclComm* communicator = take("it has been destroyed");
    lock.unlock();
    if (communicator != nullptr) nccl::disconnect(communicator);
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

  // The caller of present() or take() must hold the mutex state_.
  ncclComm* present() const {
    if (communicator_ == nullptr) {
      throw std::runtime_error("sparsekit: the NCCL communicator is no more: " + gone_);
    }
    return communicator_;
  }

  ncclComm* take(const std::string& reason) {
    if (communicator_ != nullptr) gone_ = reason;
    return std::exchange(communicator_, nullptr);
  }

  const int world_size_;
  std::mutex calls_;  // held by the sending thread, which may wait for other ranks
  std::mutex state_;  // protects the members below; held only briefly
  std::condition_variable returned_;
  bool calling_ = false;
  ncclComm* communicator_ = nullptr;
  std::string gone_;
};

}  // namespace

const char* nccl_version() {
  return nccl::header_version();
}

void add_nccl_communicator(py::module_& module) {
  // Release the GIL while a call is waiting, since other threads of this rank check for errors.
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  py::class_<NcclCommunicator>(module, "NcclCommunicator",
                               "A communicator of libnccl on the current CUDA device.")
      .def(py::init<int, int, const std::string&>(), py::arg("rank"), py::arg("world_size"),
           py::arg("unique_id"), no_gil, "Wait for all ranks, without a time limit.")
      .def("all_to_all", &NcclCommunicator::all_to_all, py::arg("send"), py::arg("send_bytes"),
           py::arg("receive"), py::arg("receive_bytes"), py::arg("stream"), no_gil,
           "Send bytes to each rank and receive bytes from each, in stream order. The first call "
           "waits for the other ranks.")
      .def("check", &NcclCommunicator::check, no_gil,
           "Raise, and abort, if something has gone wrong since the last call.")
      .def("abort", &NcclCommunicator::abort, py::arg("reason"), no_gil,
           "Free the communicator at once, also on the device; calls of other threads and later "
           "calls raise with the reason.")
      .def("destroy", &NcclCommunicator::destroy, no_gil,
           "Wait for pending work, then free the communicator.")
      .def_static("library_version", &nccl::library_version,
                  "Return the version of the libnccl that is used, such as 23007.")
      .def_static(
          "unique_id",
          [] {
            const nccl::UniqueId id = nccl::unique_id();
            return py::bytes(id.data(), id.size());
          },
          "Return a new id, which all ranks of a new communicator must pass.");
}

}  // namespace sparsekit
