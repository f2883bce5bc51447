#include "simt/counts.h"

#include <pthread.h>

#include <memory>
#include <vector>

namespace sparsekit::simt::host {
namespace {

// Each thread has its own list, so that threads do not see each other's records. Launches are
// synchronous, so all records of a launch belong to the launching thread.
thread_local std::unique_ptr<std::vector<Record>> records;

// Address of the next output of a call that is only planned, or 0 while calls are being executed.
// The addresses are beyond those that Linux uses.
constexpr uintptr_t kWithoutMemory = uintptr_t{1} << 56;
thread_local uintptr_t next_address = 0;

}  // namespace

alignas(64) std::atomic<int> counted_launches{0};
bool sees_plain_accesses = false;

void Traffic::access(Access access, uintptr_t at, int64_t bytes) {
  atomics_ += access == Access::kAtomic;
  accessed_ += access == Access::kAtomic ? 2 * bytes : bytes;
  if (bytes <= 0) return;
  const uintptr_t last_sector = (at + static_cast<uintptr_t>(bytes) - 1) / kSectorBytes;
  for (uintptr_t sector = at / kSectorBytes; sector <= last_sector; ++sector) {
    const uintptr_t number = sector / kPageSectors;
    if (last_ == nullptr || number != last_number_) {
      last_number_ = number;
      last_ = &pages_[number];
    }
    if (access != Access::kWrite) last_->read.set(sector % kPageSectors);
    if (access != Access::kRead) last_->written.set(sector % kPageSectors);
  }
}

void Traffic::add(const Traffic& other) {
  atomics_ += other.atomics_;
  accessed_ += other.accessed_;
  for (const auto& [number, page] : other.pages_) {
    pages_[number].read |= page.read;
    pages_[number].written |= page.written;
  }
}

Record Traffic::record(const char* kernel) const {
  Record record{kernel, Request::kKernel, atomics_, accessed_, 0, 0, 1, 0};
  for (const auto& [number, page] : pages_) {
    record.read += kSectorBytes * static_cast<int64_t>(page.read.count());
    record.written += kSectorBytes * static_cast<int64_t>(page.written.count());
  }
  return record;
}

bool is_counting() {
  return records != nullptr;
}

void add_record(const Record& record) {
  if (records != nullptr) records->push_back(record);
}

void note(Request request, const char* name, int64_t read, int64_t written, int64_t operations) {
  add_record(Record{name, request, 0, read + written, read, written, operations, 0});
}

bool only_plans() {
  return next_address != 0;
}

void* address_without_memory(int64_t bytes) {
  if (is_recording()) return recorded_memory(bytes);
  if (next_address == 0) return nullptr;
  constexpr uintptr_t kAlignment = 512;
  const uintptr_t address = next_address;
  next_address += (static_cast<uintptr_t>(bytes) / kAlignment + 1) * kAlignment;
  return reinterpret_cast<void*>(address);
}

bool lacks_memory(const void* address) {
  return reinterpret_cast<uintptr_t>(address) >= kWithoutMemory;
}

Range own_stack() {
  thread_local const Range range = [] {
    Range found;
    pthread_attr_t attributes;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0) return found;
    void* begin = nullptr;
    size_t bytes = 0;
    if (pthread_attr_getstack(&attributes, &begin, &bytes) == 0) {
      found.begin = reinterpret_cast<uintptr_t>(begin);
      found.end = found.begin + bytes;
    }
    pthread_attr_destroy(&attributes);
    return found;
  }();
  return range;
}

}  // namespace sparsekit::simt::host

#define SPARSEKIT_VISIBLE __attribute__((visibility("default")))

// If `on` is nonzero, starts a new list of the calling thread's records; otherwise drops the list.
// If `on` is 2, calls are only planned, not executed.
extern "C" SPARSEKIT_VISIBLE void sparsekit_simt_count(int on) {
  using namespace sparsekit::simt::host;
  records.reset(on != 0 ? new std::vector<Record> : nullptr);
  if (on != 2) {
    next_address = 0;
  } else if (next_address == 0) {
    next_address = kWithoutMemory;
  }
}

// Returns the calling thread's records, which stay valid until its next launch or its next call of
// sparsekit_simt_count.
extern "C" SPARSEKIT_VISIBLE const void* sparsekit_simt_records(int64_t* count) {
  using namespace sparsekit::simt::host;
  *count = records == nullptr ? 0 : static_cast<int64_t>(records->size());
  return records == nullptr ? nullptr : records->data();
}

// Returns 1 if byte counts include plain loads and stores, otherwise 0.
extern "C" SPARSEKIT_VISIBLE int sparsekit_simt_sees_bytes() {
  return sparsekit::simt::host::sees_plain_accesses;
}
