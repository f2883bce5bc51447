// Counts what the kernels of a launch do to device memory, and lists what a thread has asked of the
// device. Tests read it through the functions at the end of counts.cpp.
#pragma once

#include <bitset>
#include <cstdint>
#include <unordered_map>

#include "cuda/simt.cuh"

namespace sparsekit::simt::host {

// One thing that the host asked of the device. tests/simt.py reads these as they lie in memory.
struct Record {
  const char* name;
  Request request;
  int64_t atomics;
  int64_t accessed;  // bytes that threads read and wrote, however often
  int64_t read;      // bytes of the distinct sectors that were read
  int64_t written;
};

// Accesses to device memory. Memory moves in sectors of 32 bytes, and what a launch touches twice
// is taken to come from a cache the second time: so this is the least that a launch can move.
class Traffic {
 public:
  void access(Access access, uintptr_t at, int64_t bytes);
  void add(const Traffic& other);
  Record record(const char* kernel) const;

 private:
  static constexpr int64_t kSectorBytes = 32;
  static constexpr int64_t kPageSectors = 128;
  struct Page {
    std::bitset<kPageSectors> read, written;
  };

  std::unordered_map<uintptr_t, Page> pages_;
  uintptr_t last_number_ = 0;
  Page* last_ = nullptr;  // stays where it is when more are added
  int64_t atomics_ = 0, accessed_ = 0;
};

// True if the calling thread wants its requests to the device listed.
bool is_counting();
void add_record(const Record& record);

// The stack of the calling thread, where the arguments of a launch lie until kernels copy them.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool has(uintptr_t at) const { return at >= begin && at < end; }
};
Range own_stack();

// Launches being counted, of any thread: while there are none, an access costs one look at this.
extern std::atomic<int> counted_launches;
// True if kernels were compiled so that their plain loads and stores are seen (accesses.cpp).
extern bool sees_plain_accesses;

}  // namespace sparsekit::simt::host
