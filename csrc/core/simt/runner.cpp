// Runs the threads of a grid as fibers; what host.h promises. Compiled without ThreadSanitizer,
// which is told what the kernels' threads do, not what this scheduler does.
#include <sys/mman.h>

#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cuda/simt.cuh"
#include "simt/context.h"

// There when a sanitizer is in the process.
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
namespace {

constexpr int kGroups = 2;           // blocks at a time
constexpr int kWorkersPerGroup = 2;  // OS threads of a block
constexpr int kMaxThreads = 1024;
constexpr size_t kStackBytes = 128 << 10;
constexpr size_t kMaxSharedBytes = 227 << 10;
constexpr unsigned kNoSync = 1;  // for __tsan_switch_to_fiber: a switch orders nothing

void acquire(void* at) {
  if (__tsan_acquire != nullptr) __tsan_acquire(at);
}
void release(void* at) {
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
  char begin = 0, end = 0;  // addresses for ThreadSanitizer
  std::mutex mutex;
  std::string error;

  void fail(const char* what, const Position& at) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (failed.exchange(true)) return;
    error = std::string("simt: ") + name + ": " + what + " (block " + std::to_string(at.block) +
            ", thread " + std::to_string(at.thread) + ")";
  }
};

// Where the workers of a group meet: at a barrier of the kernel, or at the end of a block.
class Meeting {
 public:
  enum Kind { kBegin, kBarrier, kEnd, kGiveUp };

  // Waits for all; true if all came for the same reason, and not to give up.
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
  // Two, used in turn: a lane may enter the next collective while others still read this one.
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
  void* fake_stack = nullptr;  // AddressSanitizer's
  void* tsan = nullptr;
};

struct Group {
  Meeting meeting;
  int64_t block = -1;
  // Addresses for ThreadSanitizer: a block's start and end, and two for its barriers in turn.
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
    // Fibers put each other there, and must not be seen to allocate.
    ready_.reserve(kMaxThreads);
    waiting_.reserve(kMaxThreads);
  }

  void run(Launch& launch);
  const Position& position() const { return running_->position; }
  void maybe_switch() {
    if (!ready_.empty() && random() % 8 == 0) yield();
  }
  void wait_for_block();
  void gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]);
  [[noreturn]] void fiber_main();

 private:
  bool run_block();
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
  Context scheduler_;
  void* scheduler_tsan_ = nullptr;
  void* scheduler_fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
};

thread_local Worker* worker = nullptr;

void Worker::begin(Fiber& fiber) {
  if (__asan_unpoison_memory_region != nullptr) {
    __asan_unpoison_memory_region(fiber.stack, kStackBytes);
  }
  fiber.fake_stack = nullptr;
  fiber.context.begin(fiber.stack, kStackBytes, [] { worker->fiber_main(); });
}

void Worker::prepare(size_t count) {
  while (fibers_.size() < count) {
    auto fiber = std::make_unique<Fiber>();
    constexpr size_t kGuard = 4096;
    void* memory = mmap(nullptr, kStackBytes + kGuard, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, kGuard, PROT_NONE) != 0) {
      std::fputs("simt: no memory for a fiber's stack\n", stderr);
      std::abort();
    }
    fiber->stack = static_cast<char*>(memory) + kGuard;
    if (__tsan_create_fiber != nullptr) fiber->tsan = __tsan_create_fiber(0);
    begin(*fiber);
    if (fibers_.size() % kWarp == 0) warps_.push_back(std::make_unique<Warp>());
    fiber->warp = warps_.back().get();
    fiber->lane = static_cast<int>(fibers_.size() % kWarp);
    fibers_.push_back(std::move(fiber));
  }
}

void Worker::resume(Fiber& fiber) {
  running_ = &fiber;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&scheduler_fake_stack_, fiber.stack, kStackBytes);
  }
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(fiber.tsan, kNoSync);
  scheduler_.switch_to(fiber.context);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(scheduler_fake_stack_, nullptr, nullptr);
  }
}

// From the running fiber to the scheduler. For good: until the fiber's next block.
void Worker::leave(bool for_good) {
  Fiber& fiber = *running_;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(for_good ? nullptr : &fiber.fake_stack, scheduler_stack_,
                                   scheduler_stack_size_);
  }
  if (__tsan_switch_to_fiber != nullptr) __tsan_switch_to_fiber(scheduler_tsan_, kNoSync);
  fiber.context.switch_to(scheduler_);
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(for_good ? nullptr : fiber.fake_stack, &scheduler_stack_,
                                    &scheduler_stack_size_);
  }
}

void Worker::fiber_main() {
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack_, &scheduler_stack_size_);
  }
  for (;;) {
    acquire(&launch_->begin);
    acquire(&group_.begin);
    launch_->body(launch_->context);
    release(&group_.end);
    release(&launch_->end);
    --live_;
    leave(true);
  }
}

void Worker::wait_for_block() {
  ++at_barrier_;
  waiting_.push_back(running_);
  void* sync = &group_.sync[barrier_parity_];
  release(sync);
  leave(false);
  acquire(sync);
}

void Worker::gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]) {
  Fiber& fiber = *running_;
  Warp& warp = *fiber.warp;
  Warp::Slot& slot = warp.slots[warp.parity];
  if (warp.arrived == 0) warp.kind = kind;
  if (warp.kind != kind) {
    launch_->fail("lanes of a warp wait in different collectives", fiber.position);
    leave(false);  // and is not resumed
  }
  slot.values[fiber.lane].store(value, std::memory_order_relaxed);
  if (kind == Collective::kSync) release(&slot);
  if (++warp.arrived == kWarp) {
    warp.arrived = 0;
    warp.parity ^= 1;
    const size_t first = static_cast<size_t>(fiber.position.thread / kWarp / kWorkersPerGroup);
    for (int lane = 0; lane < kWarp; ++lane) {
      ready_.push_back(fibers_[first * kWarp + static_cast<size_t>(lane)].get());
    }
  }
  leave(false);
  if (kind == Collective::kSync) acquire(&slot);
  for (int i = 0; i < kWarp; ++i) values[i] = slot.values[i].load(std::memory_order_relaxed);
}

// Runs this worker's warps of the group's block. False when the kernel broke a rule.
bool Worker::run_block() {
  const Grid& grid = launch_->grid;
  const int num_warps = grid.threads / kWarp;
  const int participants = std::min(num_warps, kWorkersPerGroup);
  const int64_t block = group_.block % grid.blocks;
  const int column = static_cast<int>(group_.block / grid.blocks);
  const int mine = (num_warps - index_ + kWorkersPerGroup - 1) / kWorkersPerGroup;
  const size_t count = static_cast<size_t>(mine) * kWarp;
  prepare(count);
  ready_.clear();
  waiting_.clear();
  for (size_t i = 0; i < count; ++i) {
    const int warp = index_ + static_cast<int>(i) / kWarp * kWorkersPerGroup;
    fibers_[i]->position = Position{
        warp * kWarp + fibers_[i]->lane, grid.threads, block, grid.blocks, column, group_.shared()};
    ready_.push_back(fibers_[i].get());
  }
  live_ = count;
  at_barrier_ = 0;
  barrier_parity_ = 0;
  for (;;) {
    while (!ready_.empty() && !launch_->failed) {
      const size_t pick = random() % ready_.size();
      std::swap(ready_[pick], ready_.back());
      Fiber* fiber = ready_.back();
      ready_.pop_back();
      resume(*fiber);
    }
    auto kind = Meeting::kGiveUp;
    if (!launch_->failed) {
      if (live_ == 0) {
        kind = Meeting::kEnd;
      } else if (at_barrier_ == live_ && live_ == count) {
        kind = Meeting::kBarrier;
      } else {
        launch_->fail("some threads have ended, or wait at a barrier, while others wait",
                      fibers_[0]->position);
      }
    }
    const bool agreed = group_.meeting.meet(kind, participants);
    if (agreed && kind == Meeting::kEnd) return true;
    if (!agreed) {
      launch_->fail("a barrier was not reached by all threads of the block", fibers_[0]->position);
      // They are in the middle of a kernel that will never go on.
      for (size_t i = 0; i < count; ++i) begin(*fibers_[i]);
      for (auto& warp : warps_) warp->arrived = 0;
      return false;
    }
    ready_.swap(waiting_);
    at_barrier_ = 0;
    barrier_parity_ ^= 1;
  }
}

void Worker::run(Launch& launch) {
  worker = this;
  launch_ = &launch;
  random_ = launch.seed * 0x9E3779B97F4A7C15u + static_cast<uint64_t>(index_) * 977 + 1;
  random_ |= 1;
  if (__tsan_get_current_fiber != nullptr) scheduler_tsan_ = __tsan_get_current_fiber();
  const int participants = std::min(launch.grid.threads / kWarp, kWorkersPerGroup);
  if (index_ >= participants) return;
  const int64_t num_blocks = launch.grid.blocks * launch.grid.columns;
  char* shared = group_.shared();
  const auto shared_bytes = static_cast<size_t>(launch.grid.shared_bytes);
  for (;;) {
    if (index_ == 0) {
      const int64_t turn = launch.failed ? num_blocks : launch.next_block++;
      // Half of the launches begin at the far end: no kernel may rely on the order of blocks.
      group_.block = turn >= num_blocks ? -1 : launch.seed % 2 == 0 ? turn : num_blocks - 1 - turn;
      acquire(&group_.end);
      // Garbage, so that reading what was never written shows.
      if (__asan_unpoison_memory_region != nullptr) {
        __asan_unpoison_memory_region(shared, kMaxSharedBytes);
      }
      std::memset(shared, 0xA5, shared_bytes);
      if (__asan_poison_memory_region != nullptr) {
        const size_t rounded = (shared_bytes + 7) / 8 * 8;
        __asan_poison_memory_region(shared + rounded, kMaxSharedBytes - rounded);
      }
      release(&group_.begin);
    }
    if (!group_.meeting.meet(Meeting::kBegin, participants) || group_.block < 0) return;
    if (!run_block()) return;
  }
}

// The OS threads, which live as long as the process.
class Pool {
 public:
  Pool() {
    for (auto& group : groups_) {
      for (int index = 0; index < kWorkersPerGroup; ++index) {
        std::thread([this, &group, index] { serve(group, index); }).detach();
      }
    }
  }

  void run(Launch& launch) {
    const std::lock_guard<std::mutex> one_at_a_time(launches_);
    std::unique_lock<std::mutex> lock(mutex_);
    launch_ = &launch;
    busy_ = kGroups * kWorkersPerGroup;
    ++generation_;
    begin_.notify_all();
    end_.wait(lock, [&] { return busy_ == 0; });
    launch_ = nullptr;
  }

 private:
  void serve(Group& group, int index) {
    Worker worker(group, index);
    uint64_t seen = 0;
    for (;;) {
      Launch* launch = nullptr;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        begin_.wait(lock, [&] { return generation_ != seen; });
        seen = generation_;
        launch = launch_;
      }
      worker.run(*launch);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) end_.notify_all();
    }
  }

  Group groups_[kGroups];
  std::mutex launches_, mutex_;
  std::condition_variable begin_, end_;
  Launch* launch_ = nullptr;
  uint64_t generation_ = 0;
  int busy_ = 0;
};

}  // namespace

const Position& position() {
  return worker->position();
}
void maybe_switch() {
  worker->maybe_switch();
}
void wait_for_block() {
  worker->wait_for_block();
}
void gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]) {
  worker->gather_warp(kind, value, values);
}

void run_grid(const char* name, const Grid& grid, void (*body)(const void*), const void* context) {
  if (grid.blocks < 1 || grid.blocks >= int64_t{1} << 31 || grid.columns < 1 ||
      grid.columns > 65535 || grid.threads < kWarp || grid.threads > kMaxThreads ||
      grid.threads % kWarp != 0 || grid.shared_bytes < 0 ||
      grid.shared_bytes > static_cast<int64_t>(kMaxSharedBytes)) {
    throw std::runtime_error(std::string("simt: ") + name + ": a grid that no device runs");
  }
  static auto* pool = new Pool;  // never destroyed: its threads outlive every static
  static std::atomic<uint64_t> launches{0};
  Launch launch(name, grid, body, context, ++launches);
  release(&launch.begin);
  pool->run(launch);
  acquire(&launch.end);
  if (launch.failed) throw std::runtime_error(launch.error);
}

}  // namespace sparsekit::simt::host
