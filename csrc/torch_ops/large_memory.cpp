#include "large_memory.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sparsekit::ops {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Limit on the bytes per request, larger than the memory that a process can address.
constexpr size_t kMostBytes = size_t{1} << 47;

// An idle block is returned to the system after this many requests that did not use it. This covers
// several steps of a training loop, where sizes repeat.
constexpr uint64_t kPatience = 128;

// Number of idle bytes that the pool may keep in any case.
constexpr size_t kAlwaysIdle = size_t{64} << 20;

// A block may be up to this many times as large as the request, so that loops with varying sizes
// can reuse blocks. With exact sizes, the pool would need more idle bytes than it may keep.
constexpr size_t kMostSpare = 2;

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Rounds sizes up, so that steps with similar sizes request equal sizes. There are eight sizes
// between consecutive powers of two.
size_t size_class(size_t bytes) {
  size_t step = kHugePage;
  while (bytes > 16 * step) step *= 2;
  return round_up(bytes, step);
}

// Maps memory aligned to the size of huge pages, since the system uses huge pages only for aligned
// memory.
void* map(size_t bytes) {
  const size_t room = bytes + kHugePage;
  void* memory = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = round_up(begin, kHugePage);
  if (first > begin) munmap(memory, first - begin);
  const size_t behind = begin + room - (first + bytes);
  if (behind > 0) munmap(reinterpret_cast<void*>(first + bytes), behind);
  prefer_huge_pages(reinterpret_cast<void*>(first), bytes);
  return reinterpret_cast<void*>(first);
}

// Tracks the peak number of bytes in use over the last kPatience to 2 * kPatience requests.
class RecentPeak {
 public:
  void note(size_t in_use, uint64_t taken) {
    if (taken % kPatience == 0) {
      before_ = now_;
      now_ = 0;
    }
    now_ = std::max(now_, in_use);
  }
  size_t bytes() const { return std::max(before_, now_); }

 private:
  size_t before_ = 0, now_ = 0;
};

class Pool {
 public:
  void* take(size_t bytes) {
    if (bytes > kMostBytes) return nullptr;
    const size_t size = size_class(bytes);
    const std::lock_guard<std::mutex> lock(mutex_);
    ++taken_;
    while (!idle_.empty() && idle_.front().since + kPatience < taken_) unmap(idle_.begin());
    // Find the smallest block that is large enough.
    Block block{nullptr, size};
    const auto fits = by_size_.lower_bound(size);
    if (fits != by_size_.end() && fits->first <= kMostSpare * size) {
      block = take_out(fits->second);
    }
    in_use_ += block.size;
    peak_.note(in_use_, taken_);
    if (block.memory == nullptr) {
      trim();  // trim before map(), so that old and new memory do not exist at the same time
      block.memory = map(size);
      if (block.memory == nullptr) {
        clear();
        block.memory = map(size);
      }
    }
    if (block.memory == nullptr) {
      in_use_ -= size;
    } else {
      sizes_[block.memory] = block.size;
    }
    return block.memory;
  }

  void give_back(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = sizes_.find(memory);
    const size_t size = found->second;
    sizes_.erase(found);
    idle_.push_back({{memory, size}, taken_});
    by_size_.emplace(size, std::prev(idle_.end()));
    in_use_ -= size;
    idle_bytes_ += size;
    trim();
  }

  size_t release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return clear();
  }

  void count(size_t* in_use, size_t* idle, size_t* recent_peak) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *in_use = in_use_;
    *idle = idle_bytes_;
    *recent_peak = peak_.bytes();
  }

  // Lock before a fork and unlock after it. Otherwise the child could inherit a mutex locked by a
  // thread that it does not have.
  void lock() { mutex_.lock(); }
  void unlock() { mutex_.unlock(); }

 private:
  struct Block {
    void* memory;
    size_t size;
  };
  struct Idle {
    Block block;
    uint64_t since;
  };
  using Position = std::list<Idle>::iterator;

  Block take_out(Position position) {
    const Block block = position->block;
    auto [same, end] = by_size_.equal_range(block.size);
    while (same != end && same->second != position) ++same;
    by_size_.erase(same);
    idle_.erase(position);
    idle_bytes_ -= block.size;
    return block;
  }

  void unmap(Position position) {
    const Block block = take_out(position);
    munmap(block.memory, block.size);
  }

  // Limits idle memory to the recent peak of memory in use, plus kAlwaysIdle. Without this limit,
  // blocks of every new size would be kept for kPatience requests.
  void trim() {
    while (idle_bytes_ > peak_.bytes() + kAlwaysIdle) unmap(idle_.begin());
  }

  size_t clear() {
    const size_t bytes = idle_bytes_;
    while (!idle_.empty()) unmap(idle_.begin());
    return bytes;
  }

  std::mutex mutex_;
  uint64_t taken_ = 0;
  size_t in_use_ = 0, idle_bytes_ = 0;
  RecentPeak peak_;
  std::list<Idle> idle_;  // sorted by idle time, longest first
  std::multimap<size_t, Position> by_size_;
  std::unordered_map<void*, size_t> sizes_;  // size of each block in use, by address
};

// The pool is never destroyed, since tensors may outlive all other objects. It is created at load
// time: if created at first use, it could be incomplete in a forked child.
Pool& the_pool = []() -> Pool& {
  pthread_atfork([] { the_pool.lock(); }, [] { the_pool.unlock(); }, [] { the_pool.unlock(); });
  return *new Pool;
}();

}  // namespace

void* take_large_memory(size_t bytes) {
  return the_pool.take(bytes);
}

void give_back_large_memory(void* memory) {
  the_pool.give_back(memory);
}

void prefer_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = round_up(begin, kHugePage);
  const uintptr_t end = (begin + bytes) / kHugePage * kHugePage;
  if (end > first) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);
#endif
}

}  // namespace sparsekit::ops

// Returns all idle memory to the system; the result is its size in bytes.
extern "C" __attribute__((visibility("default"))) size_t sparsekit_empty_cache() {
  return sparsekit::ops::the_pool.release();
}

extern "C" __attribute__((visibility("default"))) void sparsekit_pool_bytes(size_t* in_use,
                                                                            size_t* idle,
                                                                            size_t* recent_peak) {
  sparsekit::ops::the_pool.count(in_use, idle, recent_peak);
}

extern "C" __attribute__((visibility("default"))) void sparsekit_prefer_huge_pages(void* memory,
                                                                                   size_t bytes) {
  sparsekit::ops::prefer_huge_pages(memory, bytes);
}
