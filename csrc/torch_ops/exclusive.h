// One thread at a time changes a hash table.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "arguments.h"

namespace sparsekit::ops {

// Held while the buckets are changed; raises where another thread holds them already. What is held
// is known by its address and kept beside the tables, not in them: so it covers all views of a
// table, nothing of it can be saved, and a child process, in which only the forking thread goes on,
// starts without any. On a device it covers the launches, whose kernels a stream keeps in order.
class Exclusive {
 public:
  Exclusive(const Arguments& given, const Tensor& buckets) : spans_{Span(buckets)} {
    enter(given.op());
  }
  // All of several tables, or none.
  Exclusive(const Arguments& given, const Tensors& buckets)
      : spans_(buckets.begin(), buckets.end()) {
    enter(given.op());
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

  void enter(const char* op) {
    Held& held = all();
    const std::lock_guard<std::mutex> lock(held.mutex);
    for (const Exclusive* other : held.tables) {
      for (const Span& span : spans_) {
        for (const Span& taken : other->spans_) {
          if (span.overlaps(taken)) throw std::runtime_error(message(op, kRefusal));
        }
      }
    }
    held.tables.push_back(this);
  }

  std::vector<Span> spans_;
};

}  // namespace sparsekit::ops
