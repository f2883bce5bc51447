#include "sparsekit/nccl_exchange.h"

#include <dlfcn.h>
#include <nccl.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 18, 0)
#error "sparsekit needs the nccl.h of NCCL 2.18 or later; SPARSEKIT_NCCL=0 builds without it"
#endif

namespace sparsekit::nccl {
namespace {

std::string library_name() {
  const char* set = std::getenv("SPARSEKIT_NCCL_LIBRARY");
  return set != nullptr && *set != '\0' ? set : "libnccl.so.2";
}

// Opens a library. It stays open until the process ends.
void* open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    throw std::runtime_error("sparsekit: cannot open " + name + ": " + dlerror());
  }
  return handle;
}

// libnccl's functions, looked up at run time. Linking would require libnccl wherever the module is
// imported. It could also bring a second copy of libnccl into the process, besides torch's.
struct Library {
  // An address that converts to a pointer to a function of any type.
  struct Address {
    void* address;
    template <class Function>
    operator Function*() const {
      return reinterpret_cast<Function*>(address);
    }
  };

  std::string name = library_name();
  void* handle = open(name);
  decltype(&ncclGetVersion) get_version = find("ncclGetVersion");
  decltype(&ncclGetUniqueId) get_unique_id = find("ncclGetUniqueId");
  decltype(&ncclCommInitRankConfig) init_rank = find("ncclCommInitRankConfig");
  decltype(&ncclCommGetAsyncError) get_async_error = find("ncclCommGetAsyncError");
  decltype(&ncclCommFinalize) finalize = find("ncclCommFinalize");
  decltype(&ncclCommDestroy) destroy = find("ncclCommDestroy");
  decltype(&ncclCommAbort) abort = find("ncclCommAbort");
  // null before NCCL 2.28.7, whose nccl.h does not declare it
  ncclResult_t (*revoke)(ncclComm_t, int) = find("ncclCommRevoke", false);
  decltype(&ncclGroupStart) group_start = find("ncclGroupStart");
  decltype(&ncclGroupEnd) group_end = find("ncclGroupEnd");
  decltype(&ncclSend) send = find("ncclSend");
  decltype(&ncclRecv) receive = find("ncclRecv");
  decltype(&ncclGetErrorString) error_string = find("ncclGetErrorString");
  decltype(&ncclGetLastError) last_error = find("ncclGetLastError", false);  // may be null

  Address find(const char* symbol, bool needed = true) const {
    void* address = dlsym(handle, symbol);
    if (address == nullptr && needed) {
      throw std::runtime_error("sparsekit: " + name + " has no " + symbol);
    }
    return {address};
  }
};

// Opens the library on the first call. If the library or a function is missing, throws a
// std::runtime_error that names it.
const Library& library() {
  static const Library opened;
  return opened;
}

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId));

#define SPARSEKIT_TEXT_OF(number) #number
#define SPARSEKIT_TEXT(number) SPARSEKIT_TEXT_OF(number)

void expect(ncclResult_t result, const char* function) {
  if (result == ncclSuccess) return;
  std::string message = std::string("sparsekit: ") + function + ": ";
  message += library().error_string(result);
  const char* details = library().last_error == nullptr ? nullptr : library().last_error(nullptr);
  if (details != nullptr && *details != '\0') message += std::string(": ") + details;
  throw std::runtime_error(message);
}

// Throws if the communicator has failed in the background, for example due to the network. This
// check is cheap: it reads a few words.
void expect_no_error(ncclComm_t communicator, const char* function) {
  ncclResult_t state = ncclSuccess;
  expect(library().get_async_error(communicator, &state), "ncclCommGetAsyncError");
  expect(state, function);
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

ncclComm* connect(int rank, int world_size, const UniqueId& id) {
  ncclUniqueId unique;
  std::memcpy(&unique, id.data(), id.size());
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  // Use blocking mode: otherwise NCCL would start a thread for every group, and the caller would
  // have to poll the communicator.
  config.blocking = 1;
  ncclComm_t communicator = nullptr;
  try {
    expect(library().init_rank(&communicator, world_size, unique, rank, &config),
           "ncclCommInitRankConfig");
  } catch (...) {
    abort(communicator);
    throw;
  }
  return communicator;
}

void check(ncclComm* communicator) {
  expect_no_error(communicator, "ncclCommGetAsyncError");
}

void all_to_all(ncclComm* communicator, int world_size, const void* send, const int64_t* send_bytes,
                void* receive, const int64_t* receive_bytes, void* stream) {
  const Library& nccl = library();
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  auto* from = static_cast<const char*>(send);
  auto* to = static_cast<char*>(receive);
  const char* failed = "ncclSend";
  expect(nccl.group_start(), "ncclGroupStart");
  ncclResult_t result = ncclSuccess;
  // Skip empty parts: both sender and receiver know that they are empty.
  for (int rank = 0; rank < world_size && result == ncclSuccess; ++rank) {
    if (send_bytes[rank] > 0) {
      failed = "ncclSend";
      result = nccl.send(from, send_bytes[rank], ncclUint8, rank, communicator, cuda_stream);
    }
    if (receive_bytes[rank] > 0 && result == ncclSuccess) {
      failed = "ncclRecv";
      result = nccl.receive(to, receive_bytes[rank], ncclUint8, rank, communicator, cuda_stream);
    }
    from += send_bytes[rank];
    to += receive_bytes[rank];
  }
  // End the group even after an error; otherwise later calls by this thread would be part of it.
  const ncclResult_t end = nccl.group_end();
  expect(result, failed);
  expect(end, "ncclGroupEnd");
  expect_no_error(communicator, "ncclGroupEnd");
}

void disconnect(ncclComm* communicator) {
  try {
    expect(library().finalize(communicator), "ncclCommFinalize");
  } catch (...) {
    abort(communicator);
    throw;
  }
  expect(library().destroy(communicator), "ncclCommDestroy");
}

bool revoke(ncclComm* communicator) noexcept {
  const auto function = library().revoke;
  return function != nullptr && function(communicator, 0) == ncclSuccess;
}

void abort(ncclComm* communicator) noexcept {
  // library() cannot throw here: a communicator exists only if the library is open. Ignore errors
  // from abort().
  if (communicator != nullptr) library().abort(communicator);
}

}  // namespace sparsekit::nccl
