// Lets only one thread at a time change a hash table.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "arguments.h"

namespace sparsekit::ops {

// Held while buckets are changed; raises if another thread holds them. Tables are identified by
// address in a list outside of them. So it covers all views of a table, nothing of it can be saved,
// and a forked child process, which has only the forking thread, starts with an empty list. On a
// device it covers the launches; their stream keeps the kernels in order.
class Exclusive {
 public:
  Exclusive(const Arguments& given, const Tensor& buckets) : spans_{Span(buckets)} {
    enter(given.op());
  }
  // Takes several tables, all of them or none.
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
