// Memory shared by the ranks of a group. It has a bell for each rank, and a ring for each pair of
// ranks.
//
// A ring is a stream of bytes from one process to another. The two processes do not trust each
// other: each keeps its own position in private memory and checks the other's position on every
// read. So no byte outside the ring is accessed, even if another process overwrites positions.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <stdexcept>

namespace sparsekit::shared_memory {

// Positions are multiples of this many bytes, so that the word before a message is never split.
constexpr uint64_t kGrain = 8;
// Alignment in bytes: two cache lines, since processors fetch cache lines in pairs.
constexpr size_t kLine = 128;

constexpr uint64_t padded(uint64_t size) {
  return (size + kGrain - 1) / kGrain * kGrain;
}

// The state of a ring, without the ring's bytes. A ring is empty if its state is all zeros.
struct RingState {
  alignas(kLine) std::atomic<uint64_t> written;  // number of bytes written so far
  alignas(kLine) std::atomic<uint64_t> read;
  std::atomic<uint32_t> full;  // set while the writer waits for free bytes
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "else a lock would be in this process");

// Returns the number of bytes between two positions. Throws if it exceeds the capacity, which
// happens only if a position has been overwritten.
inline uint64_t distance(uint64_t from, uint64_t to, uint64_t capacity) {
  const uint64_t size = to - from;
  if (size > capacity || size % kGrain != 0) {
    throw std::runtime_error("the memory shared with another rank has been overwritten");
  }
  return size;
}

class RingWriter {
 public:
  // `capacity` must be a power of two.
  RingWriter(RingState* state, char* bytes, uint64_t capacity)
      : state_(state), bytes_(bytes), capacity_(capacity) {}

  // Returns the number of bytes that can be written. If it is 0, the reader will see that the
  // writer is waiting.
  uint64_t room() {
    if (const uint64_t free = free_bytes()) return free;
    state_->full.store(1);
    return free_bytes();
  }

  // Writes `size` bytes (at most room()) and padding.
  void put(const void* data, uint64_t size) {
    if (size == 0) return;
    const uint64_t begin = written_ % capacity_;
    const uint64_t first = std::min(size, capacity_ - begin);
    std::memcpy(bytes_ + begin, data, first);
    std::memcpy(bytes_, static_cast<const char*>(data) + first, size - first);
    written_ += padded(size);
  }

  // Makes the bytes written so far visible to the reader.
  void publish() { state_->written.store(written_); }

 private:
  // These accesses, like those to `full`, are sequentially consistent: either the writer sees the
  // free bytes, or the reader sees that the writer is waiting.
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

  // Reads `size` bytes (at most available()) and skips the padding.
  void take(void* data, uint64_t size) {
    if (size == 0) return;
    const uint64_t begin = read_ % capacity_;
    const uint64_t first = std::min(size, capacity_ - begin);
    std::memcpy(data, bytes_ + begin, first);
    std::memcpy(static_cast<char*>(data) + first, bytes_, size - first);
    read_ += padded(size);
  }

  // Frees consumed bytes. Returns true if the writer must be woken.
  bool publish() {
    state_->read.store(read_);
    if (state_->full.load() == 0) return false;
    // Clear `full` before the writer is woken, since the writer may find the ring full again.
    state_->full.store(0);
    return true;
  }

 private:
  RingState* state_;
  const char* bytes_;
  uint64_t capacity_;
  uint64_t read_ = 0;
};

// Lets a rank sleep until another rank rings. A bell consists only of words, one of them a futex,
// so it has no lock that a dying process could leave locked.
class Bell {
 public:
  // Call this before looking for work, and pass the result to sleep().
  uint32_t rings() const { return rings_.load(); }

  // Wakes the bell's owner if it is asleep.
  void ring();

  // Waits until rings() differs from `rings`, but for at most the given time. Returns false if a
  // signal arrived.
  bool sleep(uint32_t rings, std::chrono::nanoseconds at_most);

 private:
  alignas(kLine) std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> asleep_;
};

// A mapping of an anonymous file (memfd) that cannot shrink. Forked processes do not inherit it.
class Segment {
 public:
  // Maps the file; the caller keeps the descriptor.
  Segment(int file, int world_size);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  Bell& bell(int rank) const;
  RingWriter writer(int from, int to) const;
  RingReader reader(int from, int to) const;

  // Returns the size of a ring in bytes. It is the largest power of two, up to 1 MiB, that lets all
  // rings together take at most 64 MiB, but at least 4 KiB.
  static uint64_t ring_bytes(int world_size);
  // Returns the size of the shared file in bytes.
  static uint64_t total_bytes(int world_size);

 private:
  RingState* state(int from, int to) const;
  char* bytes(int from, int to) const;

  int world_size_;
  int owner_;  // id of the process that created the mapping
  char* begin_;
};

}  // namespace sparsekit::shared_memory
