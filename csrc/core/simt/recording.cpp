#include "simt/recording.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace sparsekit::simt::host {
namespace {

struct Recording {
  std::vector<std::function<void()>> requests;
  std::vector<std::unique_ptr<char[]>> memory;
};

thread_local Recording* recording = nullptr;

}  // namespace

bool is_recording() {
  return recording != nullptr;
}

void record(std::function<void()> request) {
  recording->requests.push_back(std::move(request));
}

void* recorded_memory(int64_t bytes) {
  // Align like a device memory allocator, and give empty tensors an address too.
  constexpr size_t kAlignment = 512;
  const size_t room = static_cast<size_t>(bytes) + kAlignment;
  recording->memory.push_back(std::unique_ptr<char[]>(new char[room]));
  const auto begin = reinterpret_cast<uintptr_t>(recording->memory.back().get());
  return reinterpret_cast<void*>((begin + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace sparsekit::simt::host

#define SPARSEKIT_VISIBLE __attribute__((visibility("default")))

// Returns a new recording.
extern "C" SPARSEKIT_VISIBLE void* sparsekit_simt_new_recording() {
  return new sparsekit::simt::host::Recording;
}

// Makes the calling thread add its requests to the recording `to` instead of executing them. If
// `to` is null, the thread stops recording.
extern "C" SPARSEKIT_VISIBLE void sparsekit_simt_record(void* to) {
  sparsekit::simt::host::recording = static_cast<sparsekit::simt::host::Recording*>(to);
}

// Returns the number of requests recorded so far.
extern "C" SPARSEKIT_VISIBLE int64_t sparsekit_simt_recorded(const void* of) {
  const auto* recording = static_cast<const sparsekit::simt::host::Recording*>(of);
  return static_cast<int64_t>(recording->requests.size());
}

// Executes requests [begin, end) of a recording. Returns null, or an error message that is valid
// until the thread's next call.
extern "C" SPARSEKIT_VISIBLE const char* sparsekit_simt_replay(const void* of, int64_t begin,
                                                               int64_t end) {
  thread_local std::string error;
  const auto* recording = static_cast<const sparsekit::simt::host::Recording*>(of);
  try {
    for (int64_t i = begin; i < end; ++i) recording->requests.at(static_cast<size_t>(i))();
  } catch (const std::exception& thrown) {
    error = thrown.what();
    return error.c_str();
  }
  return nullptr;
}

extern "C" SPARSEKIT_VISIBLE void sparsekit_simt_free_recording(void* of) {
  delete static_cast<sparsekit::simt::host::Recording*>(of);
}
