// Counts kernels' accesses to device memory, and lists a thread's requests to the device. Tests
// read these counts and lists through the functions at the end of counts.cpp.
#pragma once

#include <bitset>
#include <cstdint>
#include <unordered_map>

#include "cuda/simt.cuh"

namespace sparsekit::simt::host {

// One request from the host to the device. tests/simt.py relies on this memory layout.
struct Record {
  const char* name;
  Request request;
  int64_t atomics;
  int64_t accessed;  // bytes that threads read and wrote, including repeated accesses
  int64_t read;      // bytes of the distinct sectors that were read
  int64_t written;
  int64_t operations;  // number of operations on the stream
  int64_t busiest;     // bytes that the busiest block accessed, including repeated accesses
};

// Counts accesses to device memory. Memory is moved in sectors of 32 bytes, and repeated accesses
// are assumed to hit a cache. So the result is the minimum number of bytes that a launch must move.
class Traffic {
 public:
  void access(Access access, uintptr_t at, int64_t bytes);
  void add(const Traffic& other);
  Record record(const char* kernel) const;
  int64_t accessed() const { return accessed_; }

 private:
  static constexpr int64_t kSectorBytes = 32;
  static constexpr int64_t kPageSectors = 128;
  struct Page {
    std::bitset<kPageSectors> read, written;
  };

  std::unordered_map<uintptr_t, Page> pages_;
  uintptr_t last_number_ = 0;
  Page* last_ = nullptr;  // the pointer stays valid when pages are added
  int64_t atomics_ = 0, accessed_ = 0;
};

// Returns true if the calling thread's requests are being listed.
bool is_counting();
void add_record(const Record& record);

// A range of addresses.
struct Range {
  uintptr_t begin = 0, end = 0;
  bool has(uintptr_t at) const { return at >= begin && at < end; }
};
// Returns the address range of the calling thread's stack. The stack holds the arguments of a
// launch until kernels copy them.
Range own_stack();

// Number of launches that are being counted, in all threads. While it is 0, an access costs only a
// read of this variable.
extern std::atomic<int> counted_launches;
// True if the kernels' plain loads and stores are counted (accesses.cpp).
extern bool sees_plain_accesses;

}  // namespace sparsekit::simt::host
