// A stream of bytes from one process to another, through a ring in memory that they share.
//
// Neither side trusts the other: each keeps its own position in private memory as well, and checks
// the one it reads, so whatever another process writes there, nothing beyond the ring is touched.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace sparsekit::shared_memory {

// Positions are multiples of it, so the word in front of a message is never cut in two.
constexpr uint64_t kGrain = 8;
// Two lines, since processors fetch them in pairs.
constexpr size_t kLine = 128;

constexpr uint64_t padded(uint64_t size) {
  return (size + kGrain - 1) / kGrain * kGrain;
}

// The part of a ring beside its bytes. Zeros are a ring that is empty.
struct RingState {
  alignas(kLine) std::atomic<uint64_t> written;  // bytes so far
  alignas(kLine) std::atomic<uint64_t> read;
  std::atomic<uint32_t> full;  // the writer waits for room
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "else a lock would be in this process");

// Bytes between two positions, which are at most a ring apart unless one has been overwritten.
inline uint64_t distance(uint64_t from, uint64_t to, uint64_t capacity) {
  const uint64_t size = to - from;
  if (size > capacity || size % kGrain != 0) {
    throw std::runtime_error("the memory shared with another rank has been overwritten");
  }
  return size;
}

class RingWriter {
 public:
  // The capacity is a power of two.
  RingWriter(RingState* state, char* bytes, uint64_t capacity)
      : state_(state), bytes_(bytes), capacity_(capacity) {}

  // Number of bytes that can be put. If none, the reader will see that we wait for some.
  uint64_t room() {
    if (const uint64_t free = free_bytes()) return free;
    state_->full.store(1);
    return free_bytes();
  }

  // At most as many as there is room for, and what pads them.
  void put(const void* data, uint64_t size) {
    if (size == 0) return;
    const uint64_t begin = written_ % capacity_;
    const uint64_t first = std::min(size, capacity_ - begin);
    std::memcpy(bytes_ + begin, data, first);
    std::memcpy(bytes_, static_cast<const char*>(data) + first, size - first);
    written_ += padded(size);
  }

  // Shows the reader what has been put.
  void publish() { state_->written.store(written_); }

 private:
  // In one order with `full`: either we see the room or the reader sees that we wait.
  uint64_t free_bytes() const {
    return capacity_ - distance(state_->read.load(), written_, capacity_);
  }

  RingState* state_;
  char* bytes_;
  uint64_t capacity_;
  uint64_t written_ = 0;
};

class RingReader {
 public:
  RingReader(RingState* state, const char* bytes, uint64_t capacity)
      : state_(state), bytes_(bytes), capacity_(capacity) {}

  uint64_t available() const { return distance(read_, state_->written.load(), capacity_); }

  // At most as many as are available, and what pads them.
  void take(void* data, uint64_t size) {
    if (size == 0) return;
    const uint64_t begin = read_ % capacity_;
    const uint64_t first = std::min(size, capacity_ - begin);
    std::memcpy(data, bytes_ + begin, first);
    std::memcpy(static_cast<char*>(data) + first, bytes_, size - first);
    read_ += padded(size);
  }

  // Frees consumed bytes; returns whether the writer must be woken.
  bool publish() {
    state_->read.store(read_);
    if (state_->full.load() == 0) return false;
    // Before the writer is woken, which may find the ring full once more.
    state_->full.store(0);
    return true;
  }

 private:
  RingState* state_;
  const char* bytes_;
  uint64_t capacity_;
  uint64_t read_ = 0;
};

}  // namespace sparsekit::shared_memory
