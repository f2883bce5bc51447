// The OS threads of the runner. Each thread runs the fibers of a few warps of a block.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/simt.cuh"
#include "simt/context.h"
#include "simt/counts.h"

// The following functions are null unless the process runs under a sanitizer.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void**, const void*, size_t);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void*, size_t);
[[gnu::weak]] void __asan_poison_memory_region(const volatile void*, size_t);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned);
[[gnu::weak]] void __tsan_switch_to_fiber(void*, unsigned);
[[gnu::weak]] void __tsan_acquire(void*);
[[gnu::weak]] void __tsan_release(void*);
}

namespace sparsekit::simt::host {

constexpr int kGroups = 2;           // number of blocks that run at a time
constexpr int kWorkersPerGroup = 2;  // number of OS threads per block
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr unsigned kNoSync = 1;  // for __tsan_switch_to_fiber: a switch does not order accesses

inline void acquire(void* at) {
  if (__tsan_acquire != nullptr) __tsan_acquire(at);
}
inline void release(void* at) {
  if (__tsan_release != nullptr) __tsan_release(at);
}

struct Launch {
  Launch(const char* name, const Grid& grid, void (*body)(const void*), const void* context,
         uint64_t seed)
      : name(name), grid(grid), body(body), context(context), seed(seed) {}

  const char* name;
  Grid grid;
  void (*body)(const void*);
  const void* context;
  uint64_t seed;
  std::atomic<int64_t> next_block{0};
  std::atomic<bool> failed{false};
  char begin = 0, end = 0;  // their addresses represent events in ThreadSanitizer
  bool counted = false;
  Range arguments;  // stack with the kernel's arguments, which is not device memory
  Traffic traffic;
  std::atomic<int64_t> busiest{0};  // bytes that the busiest block accessed
  std::mutex mutex;
  std::string error;

  void fail(const char* what, const Position& at) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failed.exchange(true)) return;
    error = std::string("simt: ") + name + ": " + what + " (block " + std::to_string(at.block) +
            ", thread " + std::to_string(at.thread) + ")";
  }
};

// A point where a group's workers wait for each other: a barrier in the kernel, or the start or end
// of a block.
class Meeting {
 public:
  enum Kind { kBegin, kBarrier, kEnd, kGiveUp };

  // Waits for all workers. Returns true if all of them gave the same `kind`, other than kGiveUp.
  bool meet(Kind kind, int participants) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (arrived_ == 0) {
      kind_ = kind;
      agreed_ = kind != kGiveUp;
    } else {
      agreed_ = agreed_ && kind == kind_;
    }
    if (++arrived_ == participants) {
      arrived_ = 0;
      ++generation_;
      result_ = agreed_;
      condition_.notify_all();
      return result_;
    }
    const uint64_t mine = generation_;
    condition_.wait(lock, [&] { return generation_ != mine; });
    return result_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable condition_;
  int arrived_ = 0;
  uint64_t generation_ = 0;
  Kind kind_ = kBegin;
  bool agreed_ = true, result_ = true;
};

struct Warp {
  // Slots are used alternately, since a lane may enter the next collective while other lanes are
  // still reading the values of the current one.
  struct Slot {
    std::atomic<uint64_t> values[kWarp];
  } slots[2];
  int parity = 0;
  int arrived = 0;
  Collective kind{};
};

struct Fiber {
  Context context;
  Position position{};
  Warp* warp = nullptr;
  int lane = 0;
  char* stack = nullptr;
  void* fake_stack = nullptr;  // fake stack of AddressSanitizer
  void* tsan = nullptr;
};

struct Group {
  Meeting meeting;
  int64_t block = -1;
  std::atomic<int64_t> accessed{0};  // bytes that the block's finished workers accessed
  // The addresses of these members represent events in ThreadSanitizer: the start and the end of a
  // block, and alternate barriers.
  char begin = 0, end = 0, sync[2] = {};
  std::unique_ptr<char[]> memory{new char[kMaxSharedBytes + 256]};

  char* shared() {
    return reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory.get()) + 127) &
                                   ~uintptr_t{127});
  }
};

class Worker {
 public:
  Worker(Group& group, int index) : group_(group), index_(index) {
    // Reserve memory now: fibers add elements to both vectors, and ThreadSanitizer must not see
    // them allocate.
    ready_.reserve(kMaxThreads);
    waiting_.reserve(kMaxThreads);
  }

  void run(Launch& launch);
  const Position& position() const { return running_->position; }
  void maybe_switch() {
    if (!ready_.empty() && (launch_->counted || random() % 8 == 0)) yield();
  }
  void wait_a_little() {
    std::this_thread::yield();
    yield();
  }
  void saw(Access access, uintptr_t at, int64_t bytes);
  void wait_for_block();
  void gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]);
  [[noreturn]] void fiber_main();

 private:
  void run_blocks(int participants);
  bool run_block();
  Fiber* next();
  void resume(Fiber& fiber);
  void leave(bool for_good);
  void yield() {
    ready_.push_back(running_);
    leave(false);
  }
  void prepare(size_t count);
  void begin(Fiber& fiber);
  uint64_t random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    return random_ ^= random_ << 17;
  }

  Group& group_;
  const int index_;
  Launch* launch_ = nullptr;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<std::unique_ptr<Warp>> warps_;
  std::vector<Fiber*> ready_;
  Fiber* running_ = nullptr;
  size_t live_ = 0, at_barrier_ = 0;
  std::vector<Fiber*> waiting_;
  int barrier_parity_ = 0;
  uint64_t random_ = 1;
  Traffic traffic_;  // accesses of the current launch, if it is being counted
  Context scheduler_;
  void* scheduler_tsan_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
};

}  // namespace sparsekit::simt::host
