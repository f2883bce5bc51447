// Distributes many jobs of different sizes among threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

inline ParallelFor one_thread() {
  return ParallelFor([](int64_t begin, int64_t end, int64_t, ParallelFor::Body body,
                        void* context) { body(begin, end, context); });
}

// Jobs that are divided among threads. Large jobs run first, one after another, each on all
// threads. Then each thread repeatedly takes the largest remaining small job.
class SharedJobs {
 public:
  // `order` [jobs] is workspace. size(job) returns the amount of work of a job; `worth` is the
  // minimum amount of work per thread.
  template <class Size>
  SharedJobs(int64_t jobs, int32_t* order, int64_t worth, const ParallelFor& parallel_for,
             const Size& size)
      : order_(order), jobs_(jobs), parallel_for_(parallel_for) {
    int64_t rest = 0;
    for (int64_t j = 0; j < jobs; ++j) {
      order[j] = static_cast<int32_t>(j);
      rest += size(j);
    }
    threads_ = std::min<int64_t>(parallel_for.num_threads(), 1 + rest / worth);
    if (threads_ <= 1) return;
    const auto larger = [&](int32_t a, int32_t b) { return size(a) > size(b); };
    if (!std::is_sorted(order, order + jobs, larger)) std::sort(order, order + jobs, larger);
    // Run a job on all threads if, on a single thread, it would keep the other threads waiting at
    // the end.
    while (together_ < jobs && size(order[together_]) >= worth &&
           size(order[together_]) > rest / (2 * threads_)) {
      rest -= size(order[together_++]);
    }
    threads_ = std::min(threads_, jobs - together_);
  }

  // Returns an exclusive upper bound for the `thread` that is passed to alone().
  int64_t threads() const { return std::max<int64_t>(threads_, 1); }

  // Returns the number of large jobs, which come first in `order`.
  int64_t num_together() const { return together_; }
  int32_t job(int64_t place) const { return order_[place]; }

  // Calls together(job) for large jobs, then alone(job, thread) for small jobs.
  template <class Together, class Alone>
  void run(const Together& together, const Alone& alone) const {
    for (int64_t place = 0; place < together_; ++place) together(order_[place]);
    std::atomic<int64_t> next{together_};
    parallel_for_.each(std::max<int64_t>(threads_, jobs_ > together_ ? 1 : 0), [&](int64_t thread) {
      for (int64_t place; (place = next.fetch_add(1)) < jobs_;) alone(order_[place], thread);
    });
  }

 private:
  int32_t* order_;
  int64_t jobs_;
  const ParallelFor& parallel_for_;
  int64_t threads_ = 1;
  int64_t together_ = 0;
};

// Calls work(job, unit, thread) for all units of all jobs. Job j has units_before[j + 1] -
// units_before[j] units. Each thread takes one unit after another.
template <class Work>
void share_units(const int64_t* units_before, int64_t jobs, const ParallelFor& parallel_for,
                 const Work& work) {
  const int64_t units = units_before[jobs];
  std::atomic<int64_t> next{0};
  const int64_t threads = std::min<int64_t>(parallel_for.num_threads(), units);
  parallel_for.each(threads, [&](int64_t thread) {
    int64_t job = 0;
    for (int64_t unit; (unit = next.fetch_add(1)) < units;) {
      // A thread gets units in ascending order, so `job` only moves forward.
      while (units_before[job + 1] <= unit) ++job;
      work(job, unit - units_before[job], thread);
    }
  });
}

}  // namespace sparsekit::cpu
