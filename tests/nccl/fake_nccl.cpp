// A libnccl whose ranks are threads of one process and whose tensors are in host memory, with the
// few functions that sparsekit calls. Communicators block: making one waits for all ranks.
// ncclGroupEnd waits until all messages for this rank have arrived, as the real NCCL does while it
// connects, or until a thread revokes or aborts the communicator.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

enum Result { kSuccess = 0, kInternalError = 3, kInvalidArgument = 4, kInvalidUsage = 5 };
constexpr int kUint8 = 1;

struct Config {  // the fields of ncclConfig_t that all versions share
  size_t size;
  unsigned magic, version;
  int blocking;
};

struct Id {
  char bytes[128];
};

std::mutex mutex;  // guards all members below
std::condition_variable changed;
std::string calls;
std::map<std::string, int> failures;
int async_error = kSuccess;
int ids = 0, alive = 0, aborted = 0;

struct World {
  int present = 0;
  std::map<std::pair<int, int>, std::deque<std::vector<char>>> mail;  // key: (from, to)
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
  int state = kSuccess;
  bool stopped = false;
  int groups = 0;  // number of threads in ncclGroupEnd
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

// For the tests: make the next call of a function or the next query of a communicator's state fail,
// and list the calls so far.
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
  // Put zeros in the middle: an id is not a string.
  id->bytes[100] = static_cast<char>(++ids);
  return result;
}

int ncclCommInitRankConfig(ncclComm** communicator, int world_size, Id id, int rank,
                           Config* config) {
  const int result = called("ncclCommInitRankConfig");
  if (result != kSuccess) return result;
  if (config->blocking != 1) return kInvalidArgument;
  std::unique_lock<std::mutex> lock(mutex);
  auto& known = worlds[std::string(id.bytes, sizeof id.bytes)];
  if (!known) known = std::make_shared<World>();
  const std::shared_ptr<World> world = known;
  ++world->present;
  changed.notify_all();
  changed.wait(lock, [&] { return world->present >= world_size; });
  ++alive;
  *communicator = new ncclComm{world, rank, world_size};
  return kSuccess;
}

int ncclCommGetAsyncError(ncclComm* communicator, int* state) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (async_error != kSuccess) {
    communicator->state = async_error;
    async_error = kSuccess;
  }
  *state = communicator->state;
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

#ifndef WITHOUT_REVOKE
int ncclCommRevoke(ncclComm* communicator, int) {
  const int result = called("ncclCommRevoke");
  const std::lock_guard<std::mutex> lock(mutex);
  communicator->stopped = true;
  changed.notify_all();
  return result;
}
#endif

int ncclCommAbort(ncclComm* communicator) {
  const int result = called("ncclCommAbort");
  std::unique_lock<std::mutex> lock(mutex);
  // The real ncclCommAbort would free memory that a running call still uses.
  if (communicator->groups > 0) calls += "ncclCommAbort during a call\n";
  communicator->stopped = true;
  changed.notify_all();
  changed.wait(lock, [&] { return communicator->groups == 0; });
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
  std::unique_lock<std::mutex> lock(mutex);
  for (const Part& part : parts) {
    if (!part.is_send) continue;
    part.communicator->world->mail[{part.communicator->rank, part.peer}].emplace_back(
        part.memory, part.memory + part.bytes);
    changed.notify_all();
  }
  int end = kSuccess;
  for (const Part& part : parts) {
    if (part.is_send || end != kSuccess) continue;
    ncclComm& communicator = *part.communicator;
    auto& mail = communicator.world->mail[{part.peer, communicator.rank}];
    ++communicator.groups;
    changed.wait(lock, [&] { return communicator.stopped || !mail.empty(); });
    if (communicator.stopped) {  // let the abort begin while this call still runs
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      lock.lock();
    }
    --communicator.groups;
    changed.notify_all();
    if (communicator.stopped) {
      end = kInternalError;
    } else if (mail.front().size() != part.bytes) {
      end = kInvalidArgument;
    } else {
      std::memcpy(part.memory, mail.front().data(), part.bytes);
      mail.pop_front();
    }
  }
  return end;
}

int ncclSend(const void* from, size_t bytes, int type, int peer, ncclComm* communicator,
             void* stream) {
  return enqueue(true, const_cast<void*>(from), bytes, type, peer, communicator, stream);
}

int ncclRecv(void* to, size_t bytes, int type, int peer, ncclComm* communicator, void* stream) {
  return enqueue(false, to, bytes, type, peer, communicator, stream);
}

}  // extern "C"
