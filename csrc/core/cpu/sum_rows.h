// The inner loop of every pooling and segment sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/probe.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::cpu {

// Number of rows to prefetch ahead of the row being added. It is large because, if keys repeat,
// most rows are already in the cache, and only a few are slow to load.
constexpr int64_t kRowsAhead = 64;

// Returns kRowsAhead, or fewer rows if they are so large that they would evict each other from the
// cache.
template <class T>
int64_t rows_ahead(int64_t dim) {
  const int64_t fit = 16384 / std::max<int64_t>(dim * static_cast<int64_t>(sizeof(T)), 1);
  return std::clamp<int64_t>(fit, 4, kRowsAhead);
}

// Prefetches a row into the second-level cache, which allows far more requests in flight than the
// first-level cache. With pages of 2 MiB, this reduced the time of a gather from 7.2 to 4.6 ms for
// rows of 256 bytes, and from 32 to 19 ms for rows of 1 KiB.
template <class T>
inline void prefetch_row(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < size; offset += 64) __builtin_prefetch(bytes + offset, 0, 2);
  asm volatile("");  // see prefetch()
}

// Size of a vector register in bytes, and number of registers that hold the sums of a loop.
#ifdef __AVX512F__
constexpr int kVectorBytes = 64;
constexpr int kSumRegisters = 16;
#else
constexpr int kVectorBytes = 32;
constexpr int kSumRegisters = 8;
#endif

// A vector of neighbouring elements. It is explicit because GCC does not vectorize the short loops
// here: it unrolls them before it looks for loops to vectorize.
template <class A, int kBytes>
struct VectorOf {
  typedef A type __attribute__((vector_size(kBytes)));
};
template <class A, int kBytes = kVectorBytes>
using Vector = typename VectorOf<A, kBytes>::type;
template <class A>
constexpr int kLanes = kVectorBytes / sizeof(A);

// Loads a vector from an address that need not be aligned.
template <class V, class A>
inline V load_vector(const A* elements) {
  V vector;
  std::memcpy(&vector, elements, sizeof(vector));
  return vector;
}
template <class A, class V>
inline void put_at(A* target, V vector) {
  if constexpr (sizeof(V) > sizeof(Acc<A>)) {
    std::memcpy(target, &vector, sizeof(vector));
  } else {
    *target = store<A>(vector);
  }
}

// Passed instead of a scale function if rows are added unscaled.
struct NoScale {};

// Sums scale(i) * row(i)[column : column + kWidth] for i in [begin, end), in this order. The sums
// are kept in registers.
template <int kWidth, class T, class RowAt, class ScaleAt, class Ahead, class Put>
inline void sum_block(int64_t begin, int64_t end, int64_t column, const RowAt& row,
                      const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  using A = Acc<T>;
  constexpr bool kScaled = !std::is_same_v<ScaleAt, NoScale>;
  constexpr int kBytes = std::min<int>(kWidth * sizeof(A), kVectorBytes);
  constexpr bool kVectors = std::is_same_v<T, A> && kBytes >= 16;
  using Element = std::conditional_t<kVectors, Vector<A, kBytes>, A>;
  constexpr int kStep = sizeof(Element) / sizeof(A);
  Element registers[kWidth / kStep] = {};
  for (int64_t i = begin; i < end; ++i) {
    ahead(i);
    const T* source = row(i);
    if (source == nullptr) continue;
    source += column;
    [[maybe_unused]] A factor{};
    if constexpr (kScaled) factor = scale(i);
    // Request unrolling explicitly: otherwise GCC unrolls only after it has put `registers` into
    // memory.
#pragma GCC unroll 16
    for (int r = 0; r < kWidth / kStep; ++r) {
      Element x;
      if constexpr (kVectors) {
        x = load_vector<Element>(source + r * kStep);
      } else {
        x = load(source[r]);
      }
      registers[r] += kScaled ? factor * x : x;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kWidth / kStep; ++r) put(column + r * kStep, registers[r]);
}

// Calls `sum` with the largest block size that fits in registers: a power of two, at most `width`
// columns.
template <class T, int kSize = 256, class Sum>
inline int64_t with_block(int64_t width, const Sum& sum) {
  if constexpr (kSize <= kSumRegisters * kLanes<Acc<T>>) {
    if (width >= kSize) return sum(std::integral_constant<int, kSize>{});
  }
  if constexpr (kSize > 4) return with_block<T, kSize / 2>(width, sum);
  return sum(std::integral_constant<int, 1>{});
}

// Number of rows per run. A long sum adds the rows of each run, then the sums of the runs. The
// error of a float sum grows with the number of additions that a term passes through: n if terms
// are added one after another, 256 + n / 256 with runs. The CUDA kernels split bags in the same way
// (kPart in pool_bags.cuh).
constexpr int64_t kSumRun = 256;

// Like sum_block, for more rows than fit into a single run.
template <int kWidth, class T, class RowAt, class ScaleAt, class Ahead, class Put>
[[gnu::noinline]] void sum_long_block(int64_t begin, int64_t end, int64_t column, const RowAt& row,
                                      const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  using A = Acc<T>;
  A total[kWidth] = {};
  const auto add = [&](int64_t j, auto sum) {
    A* target = total + (j - column);
    put_at(target, load_vector<decltype(sum)>(target) + sum);
  };
  const auto ask = [&](int64_t i) {
    if (column == 0) ahead(i);
  };
  for (int64_t run = begin; run < end; run += kSumRun) {
    sum_block<kWidth, T>(run, std::min(end, run + kSumRun), column, row, scale, ask, add);
  }
  for (int j = 0; j < kWidth; ++j) put(column + j, total[j]);
}

// Calls put(j, sum over i in [begin, end) of scale(i) * row(i)[j]) for j in [0, dim). Adds in order
// of i, in runs of kSumRun. The sum passed to `put` is an Acc<T>, or a Vector of the sums of
// consecutive columns that start at column j. row(i) returns a `const T*`, or null for a row to
// skip. ahead(i) is called once for each i, and may prefetch. The function is noinline: within its
// callers, GCC would not inline row() and the other functions.
template <class T, class RowAt, class ScaleAt, class Ahead, class Put>
[[gnu::noinline]] void sum_rows(int64_t begin, int64_t end, int64_t dim, const RowAt& row,
                                const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  if (dim == 0) {
    for (int64_t i = begin; i < end; ++i) row(i);  // call row() only to report invalid rows
  }
  const auto nothing = [](int64_t) {};
  for (int64_t column = 0; column < dim;) {
    column += with_block<T>(dim - column, [&](auto width) -> int64_t {
      if (end - begin > kSumRun) {
        sum_long_block<width.value, T>(begin, end, column, row, scale, ahead, put);
      } else if (column == 0) {
        sum_block<width.value, T>(begin, end, column, row, scale, ahead, put);
      } else {  // no prefetch: the first block has brought the rows into the cache
        sum_block<width.value, T>(begin, end, column, row, scale, nothing, put);
      }
      return width.value;
    });
  }
}

}  // namespace sparsekit::cpu
