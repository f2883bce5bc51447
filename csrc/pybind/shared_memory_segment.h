// The memory that the ranks of a group share: a bell for each rank and a ring for each pair.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "shared_memory_ring.h"

namespace sparsekit::shared_memory {

// A rank sleeps until another one rings its bell. A bell consists only of words, one of them a
// futex, so there is no lock that a dying process could leave locked.
class Bell {
 public:
  // Read this before looking for work; see sleep().
  uint32_t rings() const { return rings_.load(); }

  // Wakes the rank if it sleeps.
  void ring();

  // Waits for a ring since rings() was `rings`, at most for this time. Returns false at a signal.
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

  // Returns the bytes of a ring: the largest power of two up to 1 MiB with which all rings together
  // take at most 64 MiB, but at least 4 KiB.
  static uint64_t ring_bytes(int world_size);
  // Returns the size of the shared file in bytes.
  static uint64_t total_bytes(int world_size);

 private:
  RingState* state(int from, int to) const;
  char* bytes(int from, int to) const;

  int world_size_;
  int owner_;  // process id
  char* begin_;
};

}  // namespace sparsekit::shared_memory
