// Records the smallest position of an error found by any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>

namespace sparsekit::cpu {

class FirstBad {
 public:
  void report(int64_t position) {
    int64_t seen = position_.load(std::memory_order_relaxed);
    while (position < seen && !position_.compare_exchange_weak(seen, position)) {
    }
  }

  // Returns the smallest position reported, or -1 if there is none.
  int64_t position() const {
    const int64_t position = position_.load();
    return position == kNone ? -1 : position;
  }

 private:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> position_{kNone};
};

}  // namespace sparsekit::cpu
