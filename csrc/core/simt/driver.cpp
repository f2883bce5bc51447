#include "simt/driver.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

namespace sparsekit::simt::host {
namespace {

constexpr size_t kUnit = size_t{1} << 16;
constexpr int kInvalid = 1, kOutOfMemory = 2;  // as in CUresult
// New memory is filled with these bytes, since a device does not zero new memory.
constexpr int kGarbage = 0x5B;

std::mutex mutex;
// Sizes of allocations, keyed by handle; sizes of ranges and of mappings, keyed by address.
std::map<uint64_t, size_t> handles, ranges, mappings;
uint64_t last_handle = 0;
int64_t limit = INT64_MAX, in_use = 0;

bool whole(uint64_t size) {
  return size > 0 && size % kUnit == 0;
}

bool in_range(uint64_t address, size_t size) {
  auto range = ranges.upper_bound(address);
  if (range == ranges.begin()) return false;
  --range;
  return address + size <= range->first + range->second;
}

bool overlaps(uint64_t address, size_t size) {
  const auto next = mappings.lower_bound(address + size);
  if (next == mappings.begin()) return false;
  const auto before = std::prev(next);
  return before->first + before->second > address;
}

int error_string(int result, const char** text) {
  *text = result == kOutOfMemory ? "out of memory" : "invalid argument";
  return 0;
}
int device_get(int* device, int ordinal) {
  *device = ordinal;
  return 0;
}
int retain(void** context, int) {
  *context = nullptr;
  return 0;
}
int let_go(int) {
  return 0;
}
int push(void*) {
  return 0;
}
int pop(void**) {
  return 0;
}
int synchronize() {
  return 0;
}
int granularity(size_t* unit, const void*, int) {
  *unit = kUnit;
  return 0;
}

int reserve(uint64_t* address, size_t size, size_t, uint64_t, uint64_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!whole(size)) return kInvalid;
  void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return kOutOfMemory;
  *address = reinterpret_cast<uint64_t>(memory);
  ranges[*address] = size;
  return 0;
}
int free_range(uint64_t address, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto range = ranges.find(address);
  if (range == ranges.end() || range->second != size || overlaps(address, size)) return kInvalid;
  ranges.erase(range);
  munmap(reinterpret_cast<void*>(address), size);
  return 0;
}

int create(uint64_t* handle, size_t size, const void*, uint64_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (!whole(size)) return kInvalid;
  if (static_cast<int64_t>(size) > limit - in_use) return kOutOfMemory;
  in_use += static_cast<int64_t>(size);
  *handle = ++last_handle;
  handles[*handle] = size;
  return 0;
}
int release(uint64_t handle) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end()) return kInvalid;
  // A size of 0 means that the memory is still mapped; it remains in use until it is unmapped.
  in_use -= static_cast<int64_t>(found->second);
  handles.erase(found);
  return 0;
}

int map(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = handles.find(handle);
  if (found == handles.end() || found->second != size || offset != 0 || !in_range(address, size) ||
      overlaps(address, size)) {
    return kInvalid;
  }
  found->second = 0;
  mappings[address] = size;
  return 0;
}
int set_access(uint64_t address, size_t size, const void*, size_t) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(address);
  if (found == mappings.end() || found->second != size) return kInvalid;
  void* memory = reinterpret_cast<void*>(address);
  if (mprotect(memory, size, PROT_READ | PROT_WRITE) != 0) return kOutOfMemory;
  std::memset(memory, kGarbage, size);
  return 0;
}
int unmap(uint64_t address, size_t size) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = mappings.find(address);
  if (found == mappings.end() || found->second != size) return kInvalid;
  mappings.erase(found);
  in_use -= static_cast<int64_t>(size);
  void* memory = reinterpret_cast<void*>(address);
  mmap(memory, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return 0;
}

struct Function {
  const char* name;
  void* function;
};
template <class Result, class... Arguments>
void* address_of(Result (*function)(Arguments...)) {
  return reinterpret_cast<void*>(function);
}

}  // namespace

void* driver_function(const char* name) {
  static const Function functions[] = {
      {"cuGetErrorString", address_of(error_string)},
      {"cuDeviceGet", address_of(device_get)},
      {"cuDevicePrimaryCtxRetain", address_of(retain)},
      {"cuDevicePrimaryCtxRelease_v2", address_of(let_go)},
      {"cuCtxPushCurrent_v2", address_of(push)},
      {"cuCtxPopCurrent_v2", address_of(pop)},
      {"cuCtxSynchronize", address_of(synchronize)},
      {"cuMemGetAllocationGranularity", address_of(granularity)},
      {"cuMemAddressReserve", address_of(reserve)},
      {"cuMemAddressFree", address_of(free_range)},
      {"cuMemCreate", address_of(create)},
      {"cuMemRelease", address_of(release)},
      {"cuMemMap", address_of(map)},
      {"cuMemUnmap", address_of(unmap)},
      {"cuMemSetAccess", address_of(set_access)},
  };
  for (const auto& [known, function] : functions) {
    if (std::strcmp(known, name) == 0) return function;
  }
  return nullptr;
}

}  // namespace sparsekit::simt::host

// Limits the stand-in device's memory to a number of bytes; returns the bytes in use.
extern "C" __attribute__((visibility("default"))) int64_t
sparsekit_simt_limit_memory(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(sparsekit::simt::host::mutex);
  sparsekit::simt::host::limit = bytes;
  return sparsekit::simt::host::in_use;
}

// Returns the number of address ranges in use.
extern "C" __attribute__((visibility("default"))) int64_t sparsekit_simt_num_rooms() {
  const std::lock_guard<std::mutex> lock(sparsekit::simt::host::mutex);
  return static_cast<int64_t>(sparsekit::simt::host::ranges.size());
}
