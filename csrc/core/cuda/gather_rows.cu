#include "sparsekit/gather_rows.h"

#include "cuda/row_shape.h"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;
// Number of rows that a tile loads at once. Rows are scattered in memory, so the speed depends on
// the number of requests in flight.
constexpr int kRows = 4;

// Copies rows of row_words words, which begin `stride` words apart. Each tile of a block copies
// kRows rows. Adjacent tiles copy adjacent rows, so the output is written contiguously.
template <class Word>
SPARSEKIT_KERNEL __launch_bounds__(kThreads)
    gather_rows_kernel(const Word* table, int64_t num_rows, int64_t row_words, int64_t stride,
                       const int64_t* rows, int64_t n, Word* out, int64_t* bad, int log2_lanes) {
  const int tiles = kThreads >> log2_lanes;
  const int64_t first = simt::block() * tiles * kRows + (simt::thread() >> log2_lanes);
  const int64_t at = first_element(1, log2_lanes);

  // Load all row indices, then all rows, before any row is used, so that no load waits for the use
  // of another row.
  int64_t row[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int64_t i = first + j * tiles;
    row[j] = i < n ? rows[i] : -1;
  }
  Word word[kRows];
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const bool there = row[j] >= 0 && row[j] < num_rows && at < row_words;
    word[j] = there ? table[row[j] * stride + at] : Word{};
  }
#pragma unroll
  for (int j = 0; j < kRows; ++j) {
    const int64_t i = first + j * tiles;
    if (i < n && at < row_words) out[i * row_words + at] = word[j];
    if (row[j] >= num_rows && at == 0) simt::atomic_min(bad, i);
  }
}

template <class Word>
void launch_gather_rows(const void* table, int64_t num_rows, int64_t row_bytes,
                        int64_t stride_bytes, const int64_t* rows, int64_t n, void* out,
                        int64_t* bad, void* stream) {
  const int64_t row_words = row_bytes / static_cast<int64_t>(sizeof(Word));
  // Pass a type of 16 bytes, so that a lane moves one word at a time, whatever the size of Word.
  const RowShape shape = row_shape<simt::Vec<uint64_t, 2>>(row_words);
  simt::launch("gather_rows", gather_rows_kernel<Word>,
               grid_for_rows((n + kRows - 1) / kRows, shape, kThreads), stream,
               static_cast<const Word*>(table), num_rows, row_words,
               stride_bytes / static_cast<int64_t>(sizeof(Word)), rows, n, static_cast<Word*>(out),
               bad, shape.log2_lanes);
}

}  // namespace

void gather_rows(const void* table, int64_t num_rows, int64_t row_bytes, int64_t stride_bytes,
                 const int64_t* rows, int64_t n, void* out, int64_t* bad, void* stream) {
  if (n <= 0) return;
  const auto bits = reinterpret_cast<uintptr_t>(table) | reinterpret_cast<uintptr_t>(out) |
                    static_cast<uintptr_t>(row_bytes | stride_bytes);
  const auto launch = bits % 16 == 0  ? launch_gather_rows<simt::Vec<uint64_t, 2>>
                      : bits % 8 == 0 ? launch_gather_rows<uint64_t>
                      : bits % 4 == 0 ? launch_gather_rows<uint32_t>
                      : bits % 2 == 0 ? launch_gather_rows<uint16_t>
                                      : launch_gather_rows<uint8_t>;
  launch(table, num_rows, row_bytes, stride_bytes, rows, n, out, bad, stream);
}

}  // namespace sparsekit::cuda
