#include "large_memory.h"

#include <sys/mman.h>

#include <cstdint>
#include <list>
#include <map>
#include <mutex>
#include <unordered_map>

namespace sparsekit::ops {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

// Blocks are given out so many times, of any size, before one that nobody has taken meanwhile is
// returned to the system: several steps of a training loop, whose sizes repeat.
constexpr uint64_t kPatience = 128;

size_t round_up(size_t value, size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Sizes that differ little from step to step become one: eight sizes between powers of two.
size_t size_class(size_t bytes) {
  size_t step = kHugePage;
  while (bytes > 16 * step) step *= 2;
  return round_up(bytes, step);
}

// Begins at a huge page, since only whole ones can be one.
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

class Pool {
 public:
  void* take(size_t bytes) {
    const size_t size = size_class(bytes);
    if (size < bytes) return nullptr;  // beyond what an address can be
    const std::lock_guard<std::mutex> lock(mutex_);
    ++taken_;
    // The oldest are in front.
    while (!idle_.empty() && idle_.front().since + kPatience < taken_) unmap(idle_.begin());
    void* memory = nullptr;
    const auto fits = by_size_.find(size);
    if (fits != by_size_.end()) {
      memory = fits->second->memory;
      idle_.erase(fits->second);
      by_size_.erase(fits);
    } else {
      memory = map(size);
      if (memory == nullptr) {
        clear();
        memory = map(size);
      }
    }
    if (memory != nullptr) in_use_[memory] = size;
    return memory;
  }

  void give_back(void* memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto block = in_use_.find(memory);
    idle_.push_back({memory, block->second, taken_});
    by_size_.emplace(block->second, std::prev(idle_.end()));
    in_use_.erase(block);
  }

  size_t release() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return clear();
  }

 private:
  struct Idle {
    void* memory;
    size_t size;
    uint64_t since;
  };
  using Position = std::list<Idle>::iterator;

  void unmap(Position block) {
    auto [same, end] = by_size_.equal_range(block->size);
    while (same != end && same->second != block) ++same;
    by_size_.erase(same);
    munmap(block->memory, block->size);
    idle_.erase(block);
  }

  size_t clear() {
    size_t bytes = 0;
    for (; !idle_.empty(); unmap(idle_.begin())) bytes += idle_.front().size;
    return bytes;
  }

  std::mutex mutex_;
  uint64_t taken_ = 0;
  std::list<Idle> idle_;
  std::multimap<size_t, Position> by_size_;
  std::unordered_map<void*, size_t> in_use_;
};

// Never destroyed: tensors may outlive everything else.
Pool& pool() {
  static Pool& the_pool = *new Pool;
  return the_pool;
}

}  // namespace

void* take_large_memory(size_t bytes) {
  return pool().take(bytes);
}

void give_back_large_memory(void* memory) {
  pool().give_back(memory);
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

// For sparsekit/memory.py.
extern "C" __attribute__((visibility("default"))) size_t sparsekit_empty_cache() {
  return sparsekit::ops::pool().release();
}

extern "C" __attribute__((visibility("default"))) void sparsekit_prefer_huge_pages(void* memory,
                                                                                   size_t bytes) {
  sparsekit::ops::prefer_huge_pages(memory, bytes);
}
