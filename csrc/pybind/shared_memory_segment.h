// The memory that the ranks of a group share: a bell for each rank and a ring for each pair.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>

#include "shared_memory_ring.h"

namespace sparsekit::shared_memory {

// A rank sleeps until others ring its bell. All of it are words of a futex, which needs no lock
// that a process could take along as it dies.
class Bell {
 public:
  // To be asked for before looking for work; see sleep.
  uint32_t rings() const { return rings_.load(); }

  // Wakes the rank, if it sleeps.
  void ring();

  // Returns at the first ring since `rings`, at the latest after this time, or at a signal (false).
  bool sleep(uint32_t rings, std::chrono::nanoseconds at_most);

 private:
  alignas(kLine) std::atomic<uint32_t> rings_;
  std::atomic<uint32_t> asleep_;
};

// A mapping of an anonymous file (memfd) that cannot shrink. A forked process does not have it.
class Segment {
 public:
  // Maps the file, which stays the caller's.
  Segment(int file, int world_size);
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  Bell& bell(int rank) const;
  RingWriter writer(int from, int to) const;
  RingReader reader(int from, int to) const;

  // Bytes of a ring: the largest power of two up to 1 MiB with which all take at most 64 MiB, but
  // at least 4 KiB.
  static uint64_t ring_bytes(int world_size);
  // Size of the shared file in bytes.
  static uint64_t total_bytes(int world_size);

 private:
  RingState* state(int from, int to) const;
  char* bytes(int from, int to) const;

  int world_size_;
  int owner_;  // the process
  char* begin_;
};

}  // namespace sparsekit::shared_memory
