// One thread at a time changes a hash table.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "device_context.h"

namespace sparsekit::ops {

// Held while the buckets are changed; raises where another thread holds them already. What is held
// is known by its address and kept beside the tables, not in them: so it covers all views of a
// table, nothing of it can be saved, and a child process, in which only the forking thread goes on,
// starts without any. On a device it covers the launches, whose kernels a stream keeps in order.
class Exclusive {
 public:
  Exclusive(const Tensor& buckets, const char* op) : ranges_{Range(buckets)} { enter(op); }
  // All of several tables, or none.
  Exclusive(const std::vector<Tensor>& buckets, const char* op)
      : ranges_(buckets.begin(), buckets.end()) {
    enter(op);
  }
  ~Exclusive() {
    Held& held = all();
    const std::lock_guard<std::mutex> lock(held.mutex);
    held.tables.erase(std::remove(held.tables.begin(), held.tables.end(), this), held.tables.end());
  }
  Exclusive(const Exclusive&) = delete;
  Exclusive& operator=(const Exclusive&) = delete;

 private:
  static constexpr const char* kRefusal =
      ": another thread is inserting into this table; while one does, no other may use it";

  struct Range {
    uintptr_t begin, end;

    explicit Range(const Tensor& buckets)
        : begin(reinterpret_cast<uintptr_t>(buckets.const_data_ptr())),
          end(begin + static_cast<uintptr_t>(buckets.numel() * buckets.element_size())) {}
    bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  };

  struct Held {
    std::mutex mutex;
    std::vector<const Exclusive*> tables;
  };

  static Held& all() {
    static Held* held = [] {
      pthread_atfork([] { all().mutex.lock(); }, [] { all().mutex.unlock(); },
                     [] {
                       all().tables.clear();
                       all().mutex.unlock();
                     });
      return new Held;
    }();
    return *held;
  }

  void enter(const char* op) {
    Held& held = all();
    const std::lock_guard<std::mutex> lock(held.mutex);
    for (const Exclusive* other : held.tables) {
      for (const Range& range : ranges_) {
        for (const Range& taken : other->ranges_) {
          if (range.overlaps(taken)) throw std::runtime_error(message(op, kRefusal));
        }
      }
    }
    held.tables.push_back(this);
  }

  std::vector<Range> ranges_;
};

}  // namespace sparsekit::ops
