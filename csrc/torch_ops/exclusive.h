// One thread at a time changes a hash table.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "engine.h"

namespace sparsekit::ops {

// Held while the buckets are changed; raises where another thread holds them already. What is held
// is known by its address and kept beside the tables, not in them: so it covers all views of a
// table, nothing of it can be saved, and a child process, in which only the forking thread goes on,
// starts without any. On a device it covers the launches, whose kernels a stream keeps in order.
class Exclusive {
 public:
  Exclusive(const Tensor& buckets, const char* op)
      : begin_(reinterpret_cast<uintptr_t>(buckets.const_data_ptr())),
        end_(begin_ + static_cast<uintptr_t>(buckets.numel() * buckets.element_size())) {
    Held& held = all();
    const std::lock_guard<std::mutex> lock(held.mutex);
    for (const Exclusive* other : held.tables) {
      if (begin_ < other->end_ && other->begin_ < end_) {
        throw std::runtime_error(message(op, kRefusal));
      }
    }
    held.tables.push_back(this);
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

  uintptr_t begin_, end_;
};

}  // namespace sparsekit::ops
