// Two versions of the tables: lookups read one while the other one is brought up to date.
#pragma once

#include <atomic>
#include <cstdint>

namespace sparsekit::serving {

// Counts, without a lock, the lookups that are reading each of two sides. The writer changes only
// the inactive side, once no lookup is reading it any more (`idle`), and then makes it active.
// The writer never changes a side between a reader's pin() and unpin().
class Pins {
 public:
  // Each thread counts in one of several cache lines, so that threads rarely contend for a line.
  static constexpr uint32_t kStripes = 64;

  struct Pin {
    uint32_t side;
    uint32_t stripe;
  };

  Pin pin() {
    const uint32_t stripe = stripe_of_thread();
    for (;;) {
      const uint32_t side = active_.load();
      count(side, stripe).fetch_add(1);
      // If the writer has published the other side in the meantime, it may already have seen that
      // this side has no readers. All operations are sequentially consistent, so either the writer
      // sees the count, or this thread sees the new side.
      if (active_.load() == side) return {side, stripe};
      count(side, stripe).fetch_sub(1);
    }
  }

  void unpin(Pin pin) { count(pin.side, pin.stripe).fetch_sub(1); }

  uint32_t active() const { return active_.load(); }
  uint32_t inactive() const { return 1 - active_.load(); }

  // Returns true if no lookup is reading this side. While the side stays inactive, no lookup will
  // begin to: a pin() that comes too late notices this, and pins the other side instead.
  bool idle(uint32_t side) const {
    int64_t sum = 0;
    for (const Count& each : counts_[side]) sum += each.value.load();
    return sum == 0;
  }

  // Makes lookups that begin from now on read this side.
  void publish(uint32_t side) { active_.store(side); }

 private:
  struct alignas(64) Count {
    std::atomic<int64_t> value{0};
  };

  std::atomic<int64_t>& count(uint32_t side, uint32_t stripe) {
    return counts_[side][stripe].value;
  }

  static uint32_t stripe_of_thread() {
    static std::atomic<uint32_t> next{0};
    thread_local const uint32_t stripe = next.fetch_add(1, std::memory_order_relaxed) % kStripes;
    return stripe;
  }

  std::atomic<uint32_t> active_{0};
  Count counts_[2][kStripes];
};

}  // namespace sparsekit::serving
