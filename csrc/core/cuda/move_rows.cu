#include "sparsekit/move_rows.h"

#include <cstring>

#include "cuda/simt.cuh"

namespace sparsekit::cuda {
namespace {

// The rows of a tensor as words. `initial` holds 16 bytes, repeated to fill a row.
template <class Word>
struct Words {
  Word* data;
  int64_t row_words, stride_words;
  uint64_t initial[2];

  // Returns word `at` of an initial row. Takes it from registers, since an index that is not
  // constant would put `initial` into local memory.
  SPARSEKIT_DEVICE Word initial_word(int64_t at) const {
    if constexpr (sizeof(Word) == 16) {
      return Word{{initial[0], initial[1]}};
    } else {
      const auto byte = static_cast<uint64_t>(at) * sizeof(Word) % 16;
      return static_cast<Word>((byte < 8 ? initial[0] : initial[1]) >> byte % 8 * 8);
    }
  }
};

// Moves and overwrites rows, with one thread per word of a row.
template <class Word>
SPARSEKIT_KERNEL move_rows_kernel(Words<Word> words, const int32_t* new_rows, int64_t left,
                                  int64_t n, int64_t* bad_row) {
  const int64_t count = (n - left) * words.row_words;
  for (int64_t i = simt::global_thread(); i < count; i += simt::global_threads()) {
    const int64_t row = left + i / words.row_words, at = i % words.row_words;
    const int64_t place = new_rows[row];
    if (place < -1 || place >= left) {
      if (at == 0) simt::atomic_min(bad_row, row);
      continue;
    }
    Word* const word = words.data + row * words.stride_words + at;
    if (place >= 0) words.data[place * words.stride_words + at] = *word;
    *word = words.initial_word(at);
  }
}

template <class Word>
void launch_move_rows(const MovedTensor& tensor, const int32_t* new_rows, int64_t left, int64_t n,
                      int64_t* bad_row, void* stream) {
  constexpr auto kBytes = static_cast<int64_t>(sizeof(Word));
  Words<Word> words{reinterpret_cast<Word*>(tensor.data),
                    tensor.row_bytes / kBytes,
                    tensor.stride_bytes / kBytes,
                    {}};
  std::memcpy(&words.initial, tensor.initial, sizeof tensor.initial);
  simt::launch("move_rows", move_rows_kernel<Word>,
               simt::strided_grid_for((n - left) * words.row_words), stream, words, new_rows, left,
               n, bad_row);
}

}  // namespace

void move_rows(const MovedTensor* tensors, int64_t num_tensors, const int32_t* new_rows,
               int64_t left, int64_t n, int64_t* bad_row, void* stream) {
  if (n <= left) return;
  for (int64_t i = 0; i < num_tensors; ++i) {
    const MovedTensor& tensor = tensors[i];
    if (tensor.row_bytes == 0) continue;
    const auto bits = reinterpret_cast<uintptr_t>(tensor.data) |
                      static_cast<uintptr_t>(tensor.row_bytes | tensor.stride_bytes);
    const auto launch = bits % 16 == 0  ? launch_move_rows<simt::Vec<uint64_t, 2>>
                        : bits % 8 == 0 ? launch_move_rows<uint64_t>
                        : bits % 4 == 0 ? launch_move_rows<uint32_t>
                        : bits % 2 == 0 ? launch_move_rows<uint16_t>
                                        : launch_move_rows<uint8_t>;
    launch(tensor, new_rows, left, n, bad_row, stream);
  }
}

}  // namespace sparsekit::cuda
