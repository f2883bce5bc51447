// A libnccl whose ranks are threads of one process and whose tensors are in host memory, with the
// few functions that sparsekit calls. It goes on in the background as a communicator that does not
// block: a group that has ended is worked on each time that somebody asks for the state.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace {

enum Result {
  kSuccess = 0,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kInProgress = 7
};
constexpr int kUint8 = 1;

struct Config {  // the part of ncclConfig_t that all versions share
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Id {
  char bytes[128];
};

std::mutex mutex;  // over all that follows
std::string calls;
std::map<std::string, int> failures;
int async_error = kSuccess;
int ids = 0, alive = 0, aborted = 0;

struct World {
  int present = 0;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;  // (from, to)
};
std::map<std::string, std::shared_ptr<World>> worlds;

int called(const std::string& name, const std::string& details = "") {
  const std::lock_guard<std::mutex> lock(mutex);
  calls += name + details + "\n";
  if (std::getenv("FAKE_NCCL_TALKS") != nullptr) std::fprintf(stderr, "%s\n", name.c_str());
  const auto failure = failures.find(name);
  if (failure == failures.end()) return kSuccess;
  const int result = failure->second;
  failures.erase(failure);
  return result;
}

}  // namespace

struct ncclComm {
  std::shared_ptr<World> world;
  int rank, world_size;
  struct Receive {
    char* to;
    size_t bytes;
    int from;
  };
  std::vector<Receive> waiting;
  int state = kSuccess;
};

namespace {

struct Part {
  ncclComm* communicator;
  bool is_send;
  char* memory;
  size_t bytes;
  int peer;
};
thread_local int depth = 0;
thread_local std::vector<Part> group;

int enqueue(bool is_send, void* memory, size_t bytes, int type, int peer, ncclComm* communicator,
            void* stream) {
  const int result = called(is_send ? "ncclSend" : "ncclRecv",
                            " " + std::to_string(peer) + " " + std::to_string(bytes) + " " +
                                std::to_string(reinterpret_cast<uintptr_t>(stream)));
  if (result != kSuccess) return result;
  if (depth != 1) return kInvalidUsage;
  if (type != kUint8 || bytes == 0 || peer < 0 || peer >= communicator->world_size) {
    return kInvalidArgument;
  }
  group.push_back({communicator, is_send, static_cast<char*>(memory), bytes, peer});
  return kSuccess;
}

}  // namespace

extern "C" {

// For the tests: let the next call of a function fail, or a communicator that is asked for its
// state, and tell what has happened.
void fake_fail(const char* function, int result) {
  const std::lock_guard<std::mutex> lock(mutex);
  failures[function] = result;
}
void fake_async_error(int result) {
  const std::lock_guard<std::mutex> lock(mutex);
  async_error = result;
}
const char* fake_calls() {
  static std::string told;
  const std::lock_guard<std::mutex> lock(mutex);
  told.swap(calls);
  calls.clear();
  return told.c_str();
}
int fake_alive() {
  return alive;
}
int fake_aborted() {
  return aborted;
}

int ncclGetVersion(int* version) {
  *version = 12345;
  return called("ncclGetVersion");
}

const char* ncclGetErrorString(int result) {
  return result == kInternalError  ? "internal error"
         : result == kInvalidUsage ? "invalid usage"
                                   : "other error";
}

const char* ncclGetLastError(ncclComm*) {
  return "as the test has asked";
}

int ncclGetUniqueId(Id* id) {
  const int result = called("ncclGetUniqueId");
  const std::lock_guard<std::mutex> lock(mutex);
  std::memset(id->bytes, 0, sizeof id->bytes);
  // Zeros in the middle: it is no string.
  id->bytes[100] = static_cast<char>(++ids);
  return result;
}

int ncclCommInitRankConfig(ncclComm** communicator, int world_size, Id id, int rank,
                           Config* config) {
  const int result = called("ncclCommInitRankConfig");
  if (result != kSuccess) return result;
  if (config->blocking != 0) return kInvalidArgument;
  const std::lock_guard<std::mutex> lock(mutex);
  auto& world = worlds[std::string(id.bytes, sizeof id.bytes)];
  if (!world) world = std::make_shared<World>();
  ++world->present;
  ++alive;
  *communicator = new ncclComm{world, rank, world_size, {}};
  return kInProgress;
}

int ncclCommGetAsyncError(ncclComm* communicator, int* state) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (async_error != kSuccess) {
    communicator->state = async_error;
    async_error = kSuccess;
  }
  World& world = *communicator->world;
  *state = communicator->state;
  if (*state != kSuccess) return kSuccess;
  auto& waiting = communicator->waiting;
  for (size_t i = 0; i < waiting.size();) {
    auto& mail = world.mail[{waiting[i].from, communicator->rank}];
    if (mail.empty()) {
      ++i;
      continue;
    }
    if (mail.front().size() != waiting[i].bytes) {
      *state = communicator->state = kInvalidArgument;
      return kSuccess;
    }
    std::memcpy(waiting[i].to, mail.front().data(), waiting[i].bytes);
    mail.pop_front();
    waiting.erase(waiting.begin() + static_cast<int64_t>(i));
  }
  if (world.present < communicator->world_size || !waiting.empty()) *state = kInProgress;
  return kSuccess;
}

int ncclCommFinalize(ncclComm*) {
  return called("ncclCommFinalize");
}

int ncclCommDestroy(ncclComm* communicator) {
  const int result = called("ncclCommDestroy");
  const std::lock_guard<std::mutex> lock(mutex);
  delete communicator;
  --alive;
  return result;
}

int ncclCommAbort(ncclComm* communicator) {
  const int result = called("ncclCommAbort");
  const std::lock_guard<std::mutex> lock(mutex);
  delete communicator;
  --alive;
  ++aborted;
  return result;
}

int ncclGroupStart() {
  const int result = called("ncclGroupStart");
  if (result == kSuccess) ++depth;
  return result;
}

int ncclGroupEnd() {
  const int result = called("ncclGroupEnd");
  if (--depth != 0) return kInvalidUsage;
  std::vector<Part> parts;
  parts.swap(group);
  if (result != kSuccess) return result;
  const std::lock_guard<std::mutex> lock(mutex);
  for (const Part& part : parts) {
    ncclComm& communicator = *part.communicator;
    if (part.is_send) {
      communicator.world->mail[{communicator.rank, part.peer}].emplace_back(
          part.memory, part.memory + part.bytes);
    } else {
      communicator.waiting.push_back({part.memory, part.bytes, part.peer});
    }
  }
  return kInProgress;
}

int ncclSend(const void* from, size_t bytes, int type, int peer, ncclComm* communicator,
             void* stream) {
  return enqueue(true, const_cast<void*>(from), bytes, type, peer, communicator, stream);
}

int ncclRecv(void* to, size_t bytes, int type, int peer, ncclComm* communicator, void* stream) {
  return enqueue(false, to, bytes, type, peer, communicator, stream);
}

}  // extern "C"
