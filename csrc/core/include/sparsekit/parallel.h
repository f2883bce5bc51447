// Runs loops on a thread pool that the caller provides. Core has no thread pool of its own.
#pragma once

#include <cstdint>
#include <type_traits>

namespace sparsekit {

// A parallel loop over [begin, end). It may call its body on several threads, each with a sub-range
// of at least `grain` items. The body must not throw. Every kernel computes the same bits with any
// number of threads: the ranges may decide which thread does the work, but not the order of
// additions.
class ParallelFor {
 public:
  using Body = void (*)(int64_t begin, int64_t end, void* context);
  using Run = void (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* context);

  explicit ParallelFor(Run run, int num_threads = 1) : run_(run), num_threads_(num_threads) {}

  // Returns the number of parts to split work into. Results must not depend on this number.
  int num_threads() const { return num_threads_; }

  template <class F>
  void operator()(int64_t begin, int64_t end, int64_t grain, F&& body) const {
    if (begin >= end) return;
    // There is too little work to split: do not use the caller's pool.
    if (end - begin <= grain) return static_cast<void>(body(begin, end));
    using Callable = std::remove_reference_t<F>;
    run_(
        begin, end, grain,
        [](int64_t b, int64_t e, void* context) { (*static_cast<Callable*>(context))(b, e); },
        const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Calls body(i) for each i in [0, count). A thread may get a single item.
  template <class F>
  void each(int64_t count, const F& body) const {
    (*this)(0, count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) body(i);
    });
  }

 private:
  Run run_;
  int num_threads_;
};

}  // namespace sparsekit
