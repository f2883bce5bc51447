// The inner loop of every pooling and segment sum.
#pragma once

#include <cstdint>

#include "cpu/probe.h"
#include "sparsekit/dtypes.h"

namespace sparsekit::cpu {

// Rows to ask for ahead of the one being added.
constexpr int64_t kRowsAhead = 16;

template <class T>
inline void prefetch_row(const T* row, int64_t dim) {
  const char* bytes = reinterpret_cast<const char*>(row);
  const int64_t size = dim * static_cast<int64_t>(sizeof(T));
  for (int64_t offset = 0; offset < size; offset += 64) prefetch(bytes + offset);
}

// The scale of rows that are added as they are.
template <class T>
constexpr auto one = [](int64_t) { return Acc<T>{1}; };

// Adds scale(i) * row(i)[column : column + kWidth] for i in [begin, end), in this order, in
// registers.
template <int kWidth, class T, class RowAt, class ScaleAt, class Ahead, class Put>
inline void sum_block(int64_t begin, int64_t end, int64_t column, const RowAt& row,
                      const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  Acc<T> registers[kWidth] = {};
  for (int64_t i = begin; i < end; ++i) {
    ahead(i + kRowsAhead);
    const T* source = row(i);
    if (source == nullptr) continue;
    const Acc<T> factor = scale(i);
    for (int j = 0; j < kWidth; ++j) registers[j] += factor * load(source[column + j]);
  }
  for (int j = 0; j < kWidth; ++j) put(column + j, registers[j]);
}

// put(j, sum over i in [begin, end) of scale(i) * row(i)[j]) for j in [0, dim), added in the order
// of i. row(i) is a `const T*`, null for a row to leave out. ahead(i) is called with entries that
// will be read soon, also past `end`, and prefetches what it likes.
template <class T, class RowAt, class ScaleAt, class Ahead, class Put>
inline void sum_rows(int64_t begin, int64_t end, int64_t dim, const RowAt& row,
                     const ScaleAt& scale, const Ahead& ahead, const Put& put) {
  const auto nothing = [](int64_t) {};
  int64_t column = 0;
  if (dim >= 64) {
    sum_block<64, T>(begin, end, 0, row, scale, ahead, put);
    column = 64;
  } else if (dim >= 16) {
    sum_block<16, T>(begin, end, 0, row, scale, ahead, put);
    column = 16;
  } else if (dim > 0) {
    sum_block<1, T>(begin, end, 0, row, scale, ahead, put);
    column = 1;
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
