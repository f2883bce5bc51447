// Code shared by ops on hash tables: checks of arguments, a lock that allows only one thread at a
// time to change a table, and the seed of temporary tables.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <random>
#include <vector>

#include "kept_list.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::ops {

constexpr int64_t kWordsPerBucket = sizeof(Bucket) / sizeof(int64_t);

// Checks the buckets of a table, and returns the number of buckets.
template <class AnyTensor>
int64_t read_buckets(Arguments& given, const Item& name, const AnyTensor& buckets) {
  given.written_rows(name, buckets, ScalarType::Long);
  const auto [num_buckets, words] = given.check_dim(name, buckets, 2);
  given.check(words == kWordsPerBucket, name, " must have size ", kWordsPerBucket,
              " in dimension 1, got ", words);
  given.check_contiguous(name, buckets);
  given.check(num_buckets > 0, name, " must not be empty");
  given.check(!kOnDevice || reinterpret_cast<uintptr_t>(buckets.const_data_ptr()) % 16 == 0, name,
              " must lie at a multiple of 16 bytes");
  return num_buckets;
}

inline void check_size_value(const Arguments& given, const Item& name, int64_t size,
                             int64_t num_buckets) {
  given.check(size >= 0 && size <= num_buckets * kSlotsPerBucket, name, " is ", size,
              ", but the buckets have ", num_buckets * kSlotsPerBucket, " slots");
}

// A lock to hold while buckets are changed. Raises an error if another thread holds it. The locked
// tables are identified by address, in a list outside the tables. So a lock covers all views of a
// table and is not saved with the table. A forked child process starts with an empty list, since it
// has only the forking thread. On a device, the lock is held only during the launches; stream order
// does the rest.
class Exclusive {
 public:
  Exclusive(const Arguments& given, const Tensor& buckets) : spans_{Span(buckets)} {
    enter(given.op());
  }
  // Locks either all of these tables or none of them.
  Exclusive(const Arguments& given, const Views& buckets) {
    spans_.reserve(buckets.size());
    for (const View& view : buckets) spans_.push_back(view.span());
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

// Returns a random seed, drawn once per process, so that colliding keys cannot be constructed.
// Results do not depend on the seed.
inline int64_t process_seed() {
  static const int64_t seed = [] {
    std::random_device random;  // uses the system's source of randomness
    return static_cast<int64_t>(uint64_t{random()} << 32 | random());
  }();
  return seed;
}

}  // namespace sparsekit::ops
