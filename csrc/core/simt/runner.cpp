// Runs the threads of a grid as fibers; see host.h. This file is compiled without ThreadSanitizer,
// which must see the threads of kernels but not this scheduler.
#include <stdexcept>
#include <thread>

#include "simt/worker.h"

namespace sparsekit::simt::host {
namespace {

// A pool of OS threads, which live until the process ends.
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

void run_grid(const char* name, const Grid& grid, void (*body)(const void*), const void* context) {
  if (grid.blocks < 1 || grid.blocks >= int64_t{1} << 31 || grid.columns < 1 ||
      grid.columns > 65535 || grid.threads < kWarp || grid.threads > kMaxThreads ||
      grid.threads % kWarp != 0 || grid.shared_bytes < 0 ||
      grid.shared_bytes > static_cast<int64_t>(kMaxSharedBytes)) {
    throw std::runtime_error(std::string("simt: ") + name + ": a grid that no device runs");
  }
  if (only_plans()) return note(Request::kKernel, name, 0, 0);
  static auto* pool = new Pool;  // never destroyed: its threads outlive every static
  static std::atomic<uint64_t> launches{0};
  Launch launch(name, grid, body, context, ++launches);
  launch.counted = is_counting();
  if (launch.counted) {
    launch.arguments = own_stack();
    ++counted_launches;
  }
  release(&launch.begin);
  pool->run(launch);
  acquire(&launch.end);
  if (launch.counted) {
    --counted_launches;
    if (!launch.failed) {
      Record record = launch.traffic.record(name);
      record.busiest = launch.busiest;
      add_record(record);
    }
  }
  if (launch.failed) throw std::runtime_error(launch.error);
}

}  // namespace sparsekit::simt::host
