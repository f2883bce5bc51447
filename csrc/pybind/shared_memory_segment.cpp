#include "shared_memory_segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <ctime>
#include <stdexcept>
#include <system_error>

namespace sparsekit::shared_memory {

namespace {

constexpr uint64_t kLargestRing = 1 << 20, kSmallestRing = 1 << 12, kAllRings = 1 << 26;

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "a futex is such a word");
  return syscall(SYS_futex, word, operation, value, timeout, nullptr, 0);
}

// A segment has three areas: the bells, the states of the rings, and the bytes of the rings. Each
// area begins at a multiple of kPage.
constexpr uint64_t kPage = 4096;

constexpr uint64_t pages(uint64_t size) {
  return (size + kPage - 1) / kPage * kPage;
}

uint64_t states_begin(uint64_t world_size) {
  return pages(world_size * sizeof(Bell));
}

uint64_t rings_begin(uint64_t world_size) {
  return states_begin(world_size) + pages(world_size * world_size * sizeof(RingState));
}

}  // namespace

void Bell::ring() {
  // ring() and sleep() use sequentially consistent atomics. Either ring() sees that the rank is
  // sleeping, or the rank's futex call returns at once, since rings_ has changed.
  rings_.fetch_add(1);
  if (asleep_.load() != 0) futex(&rings_, FUTEX_WAKE, INT_MAX, nullptr);
}

bool Bell::sleep(uint32_t rings, std::chrono::nanoseconds at_most) {
  constexpr int64_t kSecond = 1'000'000'000;
  const timespec timeout{static_cast<time_t>(at_most.count() / kSecond),
                         static_cast<long>(at_most.count() % kSecond)};
  asleep_.store(1);
  const long result = futex(&rings_, FUTEX_WAIT, rings, &timeout);
  const int error = errno;
  asleep_.store(0);
  return result == 0 || error != EINTR;
}

Segment::Segment(int file, int world_size) : world_size_(world_size), owner_(getpid()) {
  const uint64_t size = total_bytes(world_size);
  struct stat status{};
  const int seals = fcntl(file, F_GET_SEALS);
  if (seals < 0 || fstat(file, &status) != 0) {
    throw std::system_error(errno, std::generic_category(), "looking at shared memory");
  }
  // Check the size: an access to the mapping beyond the end of the file would kill the process.
  if ((seals & F_SEAL_SHRINK) == 0 || static_cast<uint64_t>(status.st_size) != size) {
    throw std::runtime_error("the shared memory is not what this rank expects");
  }
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) {
    throw std::system_error(errno, std::generic_category(), "mapping shared memory");
  }
  begin_ = static_cast<char*>(memory);
  madvise(memory, size, MADV_DONTFORK);
}

Segment::~Segment() {
  // A forked process does not have this mapping, and may have other memory at the same address.
  if (getpid() == owner_) munmap(begin_, total_bytes(world_size_));
}

Bell& Segment::bell(int rank) const {
  return reinterpret_cast<Bell*>(begin_)[rank];
}

RingWriter Segment::writer(int from, int to) const {
  return {state(from, to), bytes(from, to), ring_bytes(world_size_)};
}

RingReader Segment::reader(int from, int to) const {
  return {state(from, to), bytes(from, to), ring_bytes(world_size_)};
}

RingState* Segment::state(int from, int to) const {
  const auto first = reinterpret_cast<RingState*>(begin_ + states_begin(world_size_));
  return first + static_cast<int64_t>(from) * world_size_ + to;
}

char* Segment::bytes(int from, int to) const {
  // There is no ring from a rank to itself.
  const uint64_t number = static_cast<uint64_t>(from) * (world_size_ - 1) + to - (to > from);
  return begin_ + rings_begin(world_size_) + number * ring_bytes(world_size_);
}

uint64_t Segment::ring_bytes(int world_size) {
  const uint64_t rings = static_cast<uint64_t>(world_size) * (world_size - 1);
  uint64_t size = kLargestRing;
  while (size > kSmallestRing && size * rings > kAllRings) size /= 2;
  return size;
}

uint64_t Segment::total_bytes(int world_size) {
  const uint64_t ranks = world_size;
  return rings_begin(ranks) + ranks * (ranks - 1) * ring_bytes(world_size);
}

}  // namespace sparsekit::shared_memory
