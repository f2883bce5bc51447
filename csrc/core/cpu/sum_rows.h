// The inner loop of every pooling and segment sum.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "cpu/probe.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::cpu {

// Rows to ask for ahead of the one being added.
constexpr int64_t kRowsAhead = 16;

// The same for large rows, of which so many would not fit in the line buffers.
template <class T>
int64_t rows_ahead(int64_t dim) {
  const int64_t fit = 4096 / std::max<int64_t>(dim * static_cast<int64_t>(sizeof(T)), 1);
  return std::clamp<int64_t>(fit, 4, kRowsAhead);
}

template <class T>
inline void prefetch_row(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < size; offset += 64) prefetch(bytes + offset);
}

// Some neighbouring elements. Loops over a few elements are unrolled before GCC looks for vectors
// in them, which it then does not find.
template <class A>
struct VectorOf {};
template <>
struct VectorOf<float> {
  typedef float type __attribute__((vector_size(32)));
};
template <>
struct VectorOf<double> {
  typedef double type __attribute__((vector_size(32)));
};
template <class A>
using Vector = typename VectorOf<A>::type;
template <class A>
constexpr int64_t kLanes = 32 / sizeof(A);

// From and to any address.
template <class A>
inline Vector<A> load_vector(const A* elements) {
  Vector<A> vector;
  std::memcpy(&vector, elements, sizeof(vector));
  return vector;
}
inline void put_at(float* target, Vector<float> value) {
  std::memcpy(target, &value, sizeof(value));
}
inline void put_at(double* target, Vector<double> value) {
  std::memcpy(target, &value, sizeof(value));
}

template <class T>
inline void put_at(T* target, Acc<T> value) {
  *target = store<T>(value);
}

// The scale of rows that are added as they are.
struct NoScale {};

// Adds scale(i) * row(i)[column : column + kWidth] for i in [begin, end), in this order, in
// registers.
template <int kWidth, class T, class RowAt, class ScaleAt, class Ahead, class Put>
inline void sum_block(int64_t begin, int64_t end, int64_t column, const RowAt& row,
                      const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  using A = Acc<T>;
  constexpr bool kScaled = !std::is_same_v<ScaleAt, NoScale>;
  constexpr bool kVectors = std::is_same_v<T, A> && kWidth % kLanes<A> == 0;
  using Element = std::conditional_t<kVectors, Vector<A>, A>;
  constexpr int kStep = kVectors ? kLanes<A> : 1;
  Element registers[kWidth / kStep] = {};
  for (int64_t i = begin; i < end; ++i) {
    ahead(i);
    const T* source = row(i);
    if (source == nullptr) continue;
    [[maybe_unused]] A factor{};
    if constexpr (kScaled) factor = scale(i);
    for (int r = 0; r < kWidth / kStep; ++r) {
      Element x;
      if constexpr (kVectors) {
        x = load_vector(source + column + r * kStep);
      } else {
        x = load(source[column + r]);
      }
      registers[r] += kScaled ? factor * x : x;
    }
  }
  for (int r = 0; r < kWidth / kStep; ++r) put(column + r * kStep, registers[r]);
}

// put(j, sum over i in [begin, end) of scale(i) * row(i)[j]) for j in [0, dim), added in the order
// of i; the sum is one of Acc<T>, or a Vector of those from j on. row(i) is a `const T*`, null for
// a row to leave out. ahead(i) is called once for each i, and prefetches what it likes.
template <class T, class RowAt, class ScaleAt, class Ahead, class Put>
inline void sum_rows(int64_t begin, int64_t end, int64_t dim, const RowAt& row,
                     const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  const auto nothing = [](int64_t) {};
  int64_t column = 0;
  if (dim >= 64) {
    sum_block<64, T>(begin, end, 0, row, scale, ahead, put);
    column = 64;
  } else if (dim >= 32) {
    sum_block<32, T>(begin, end, 0, row, scale, ahead, put);
    column = 32;
  } else if (dim >= 16) {
    sum_block<16, T>(begin, end, 0, row, scale, ahead, put);
    column = 16;
  } else if (dim > 0) {
    sum_block<1, T>(begin, end, 0, row, scale, ahead, put);
    column = 1;
  } else {
    for (int64_t i = begin; i < end; ++i) row(i);  // which may find that there is no such row
  }
  // The first block has brought the rows into the cache.
  for (; column + 64 <= dim; column += 64) {
    sum_block<64, T>(begin, end, column, row, scale, nothing, put);
  }
  for (; column + 16 <= dim; column += 16) {
    sum_block<16, T>(begin, end, column, row, scale, nothing, put);
  }
  for (; column + 4 <= dim; column += 4) {
    sum_block<4, T>(begin, end, column, row, scale, nothing, put);
  }
  for (; column < dim; ++column) sum_block<1, T>(begin, end, column, row, scale, nothing, put);
}

}  // namespace sparsekit::cpu
