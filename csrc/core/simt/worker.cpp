#include "simt/worker.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace sparsekit::simt::host {
namespace {

thread_local Worker* worker = nullptr;

}  // namespace

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

// Removes and returns the fiber that runs next. While accesses are being counted, the fibers run in
// turn, so that, as on a device, many threads reach an atomic before the first one has passed it.
Fiber* Worker::next() {
  if (!launch_->counted) std::swap(ready_[random() % ready_.size()], ready_.back());
  const auto at = launch_->counted ? ready_.begin() : ready_.end() - 1;
  Fiber* fiber = *at;
  ready_.erase(at);
  return fiber;
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

// Switches from the running fiber to the scheduler. for_good is true if the fiber has finished its
// block.
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

void Worker::saw(Access access, uintptr_t at, int64_t bytes) {
  if (!launch_->counted) return;
  const auto in = [at](const void* begin, size_t size) {
    return at - reinterpret_cast<uintptr_t>(begin) < size;
  };
  if (in(running_->stack, kStackBytes) || in(running_, sizeof *running_) ||
      in(group_.shared(), kMaxSharedBytes) || launch_->arguments.has(at)) {
    return;
  }
  traffic_.access(access, at, bytes);
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
    leave(false);  // does not return, since the fiber is not resumed
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

// Runs this worker's warps of the group's block. Returns false if the kernel has broken a rule.
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
  const int64_t accessed_before = traffic_.accessed();
  for (;;) {
    while (!ready_.empty() && !launch_->failed) {
      resume(*next());
    }
    auto kind = Meeting::kGiveUp;
    if (!launch_->failed) {
      if (live_ == 0) {
        kind = Meeting::kEnd;
        group_.accessed += traffic_.accessed() - accessed_before;
      } else if (at_barrier_ == live_ && live_ == count) {
        kind = Meeting::kBarrier;
      } else {
        launch_->fail("some threads have ended, or wait at a barrier, while others wait",
                      fibers_[0]->position);
      }
    }
    const bool agreed = group_.meeting.meet(kind, participants);
    if (agreed && kind == Meeting::kEnd) {
      if (index_ == 0) {
        const int64_t accessed = group_.accessed;
        int64_t busiest = launch_->busiest;
        while (accessed > busiest && !launch_->busiest.compare_exchange_weak(busiest, accessed)) {
        }
      }
      return true;
    }
    if (!agreed) {
      launch_->fail("a barrier was not reached by all threads of the block", fibers_[0]->position);
      // Restart the fibers: they are in the middle of a kernel that will not be continued.
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
  run_blocks(participants);
  if (!launch.counted) return;
  const std::lock_guard<std::mutex> lock(launch.mutex);
  launch.traffic.add(traffic_);
  traffic_ = Traffic{};
}

void Worker::run_blocks(int participants) {
  Launch& launch = *launch_;
  const int64_t num_blocks = launch.grid.blocks * launch.grid.columns;
  char* shared = group_.shared();
  const auto shared_bytes = static_cast<size_t>(launch.grid.shared_bytes);
  for (;;) {
    if (index_ == 0) {
      const int64_t turn = launch.failed ? num_blocks : launch.next_block++;
      // Half of the launches begin with the last block, since kernels must not rely on the order of
      // blocks.
      group_.block = turn >= num_blocks ? -1 : launch.seed % 2 == 0 ? turn : num_blocks - 1 - turn;
      group_.accessed = 0;
      acquire(&group_.end);
      // Fill shared memory with garbage, so that reads of uninitialised memory give wrong results.
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

const Position& position() {
  return worker->position();
}
void maybe_switch() {
  worker->maybe_switch();
}
void wait_a_little() {
  worker->wait_a_little();
}
void saw(Access access, const void* address, int64_t bytes) {
  if (counted_launches.load(std::memory_order_relaxed) == 0) return;
  if (worker != nullptr) worker->saw(access, reinterpret_cast<uintptr_t>(address), bytes);
}
void wait_for_block() {
  worker->wait_for_block();
}
void gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]) {
  worker->gather_warp(kind, value, values);
}

}  // namespace sparsekit::simt::host
