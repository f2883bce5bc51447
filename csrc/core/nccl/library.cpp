#include "library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace sparsekit::nccl {
namespace {

// Opens a library, which stays open until the process ends.
void* open(const std::string& name) {
  void* handle = dlopen(name.c_str(), RTLD_NOLOAD | RTLD_LAZY);
  if (handle == nullptr) handle = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    throw std::runtime_error("sparsekit: cannot open " + name + ": " + dlerror());
  }
  return handle;
}

Library open_library() {
  const char* set = std::getenv("SPARSEKIT_NCCL_LIBRARY");
  const std::string name = set != nullptr && *set != '\0' ? set : "libnccl.so.2";
  void* handle = open(name);
  Library found{};
  const auto find = [&](auto& function, const char* symbol, bool needed = true) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(handle, symbol));
    if (function == nullptr && needed) {
      throw std::runtime_error("sparsekit: " + name + " has no " + symbol);
    }
  };
  find(found.get_version, "ncclGetVersion");
  find(found.get_unique_id, "ncclGetUniqueId");
  find(found.init_rank, "ncclCommInitRankConfig");
  find(found.get_async_error, "ncclCommGetAsyncError");
  find(found.finalize, "ncclCommFinalize");
  find(found.destroy, "ncclCommDestroy");
  find(found.abort, "ncclCommAbort");
  find(found.revoke, "ncclCommRevoke", false);
  find(found.group_start, "ncclGroupStart");
  find(found.group_end, "ncclGroupEnd");
  find(found.send, "ncclSend");
  find(found.receive, "ncclRecv");
  find(found.error_string, "ncclGetErrorString");
  find(found.last_error, "ncclGetLastError", false);
  return found;
}

}  // namespace

const Library& library() {
  static const Library opened = open_library();
  return opened;
}

}  // namespace sparsekit::nccl
