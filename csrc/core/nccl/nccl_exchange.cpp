#include "sparsekit/nccl_exchange.h"

#include <chrono>
#include <cstring>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>

#include "library.h"

namespace sparsekit::nccl {
namespace {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

#define SPARSEKIT_TEXT_OF(number) #number
#define SPARSEKIT_TEXT(number) SPARSEKIT_TEXT_OF(number)

// Calls on communicators that do not block may also say that they go on in the background.
void expect(ncclResult_t result, const char* function) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  std::string message = std::string("sparsekit: ") + function + ": ";
  message += library().error_string(result);
  const char* details = library().last_error == nullptr ? nullptr : library().last_error(nullptr);
  if (details != nullptr && *details != '\0') message += std::string(": ") + details;
  throw std::runtime_error(message);
}

ncclResult_t state_of(ncclComm_t communicator) {
  ncclResult_t state = ncclSuccess;
  expect(library().get_async_error(communicator, &state), "ncclCommGetAsyncError");
  return state;
}

// Until the communicator has done what the function began. It has no other way to tell.
void wait(ncclComm_t communicator, const char* function, double seconds) {
  using Clock = std::chrono::steady_clock;
  const auto begin = Clock::now();
  for (;;) {
    const ncclResult_t state = state_of(communicator);
    expect(state, function);
    if (state == ncclSuccess) return;
    const double waited = std::chrono::duration<double>(Clock::now() - begin).count();
    if (waited > seconds) {
      std::ostringstream message;
      message << "sparsekit: " << function << " has not ended within " << seconds
              << " s; another rank may be gone";
      throw std::runtime_error(message.str());
    }
    // A launch takes microseconds, a connection up to seconds.
    if (waited < 0.01) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
}

}  // namespace

const char* header_version() {
  return SPARSEKIT_TEXT(NCCL_MAJOR) "." SPARSEKIT_TEXT(NCCL_MINOR) "." SPARSEKIT_TEXT(NCCL_PATCH);
}

int library_version() {
  int version = 0;
  expect(library().get_version(&version), "ncclGetVersion");
  return version;
}

UniqueId unique_id() {
  ncclUniqueId id;
  expect(library().get_unique_id(&id), "ncclGetUniqueId");
  UniqueId bytes;
  std::memcpy(bytes.data(), &id, bytes.size());
  return bytes;
}

ncclComm* connect(int rank, int world_size, const UniqueId& id, double seconds) {
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  ncclComm_t communicator = nullptr;
  try {
    expect(library().init_rank(&communicator, world_size, unique, rank, &config),
           "ncclCommInitRankConfig");
    wait(communicator, "ncclCommInitRankConfig", seconds);
  } catch (...) {
    abort(communicator);
    throw;
  }
  return communicator;
}

void check(ncclComm* communicator) {
  expect(state_of(communicator), "ncclCommGetAsyncError");
}

void all_to_all(ncclComm* communicator, int world_size, const void* send, const int64_t* send_bytes,
                void* receive, const int64_t* receive_bytes, void* stream, double seconds) {
  const Library& nccl = library();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  auto* from = static_cast<const char*>(send);
  auto* to = static_cast<char*>(receive);
  const char* failed = "ncclSend";
  expect(nccl.group_start(), "ncclGroupStart");
  ncclResult_t result = ncclSuccess;
  const auto fine = [&] { return result == ncclSuccess || result == ncclInProgress; };
  // Both sides of an empty part know that it is empty.
  for (int rank = 0; rank < world_size && fine(); ++rank) {
    if (send_bytes[rank] > 0) {
      failed = "ncclSend";
      result = nccl.send(from, send_bytes[rank], ncclUint8, rank, communicator, cuda_stream);
    }
    if (receive_bytes[rank] > 0 && fine()) {
      failed = "ncclRecv";
      result = nccl.receive(to, receive_bytes[rank], ncclUint8, rank, communicator, cuda_stream);
    }
    from += send_bytes[rank];
    to += receive_bytes[rank];
  }
  // A group that has begun must end, or all later calls of this thread would be part of it.
  const ncclResult_t end = nccl.group_end();
  expect(result, failed);
  expect(end, "ncclGroupEnd");
  wait(communicator, "ncclGroupEnd", seconds);
}

void disconnect(ncclComm* communicator, double seconds) {
  try {
    expect(library().finalize(communicator), "ncclCommFinalize");
    wait(communicator, "ncclCommFinalize", seconds);
  } catch (...) {
    abort(communicator);
    throw;
  }
  expect(library().destroy(communicator), "ncclCommDestroy");
}

void abort(ncclComm* communicator) noexcept {
  // There is a library if there is a communicator. An error of this call changes nothing.
  if (communicator != nullptr) library().abort(communicator);
}

}  // namespace sparsekit::nccl
