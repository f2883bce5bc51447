// Lists of tensors that Python passes again and again. To convert hundreds of tensors takes longer
// than the ops that take them. So the op `kept_list` converts them once and returns a tensor that
// may be passed as the only item in place of the list. It keeps the tensors alive.
#pragma once

#include <algorithm>
#include <iterator>

#include "arguments.h"

namespace sparsekit::ops {

class KeptList {
 public:
  static Tensor make(Tensors tensors) {
    auto* list = new KeptList(std::move(tensors));
    const int64_t sizes[] = {kWords, 1, 1, 1}, strides[] = {1, 1, 1, 1};
    return torch::stable::from_blob(list->words_, {sizes, kDim}, {strides, kDim},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    ScalarType::Long, &KeptList::free);
  }

  // Returns the tensors that the only item of a list stands for, or the list itself. The result is
  // valid as long as `given`.
  static const Tensors& tensors_of(const Tensors& given) {
    if (given.size() != 1 || given[0].dim() != kDim) return given;
    const Tensor& item = given[0];
    if (!item.is_cpu() || dtype_of(item) != ScalarType::Long) return given;
    if (!item.is_contiguous() || item.numel() != kWords) return given;
    const int64_t* words = int64_data(item);
    // A copy of the words, at another address, does not keep the tensors alive, and is no list.
    if (!std::equal(kMark, kMark + kMarkWords, words) || words[kMarkWords] != address(words)) {
      return given;
    }
    return reinterpret_cast<const KeptList*>(words)->tensors_;
  }

 private:
  static constexpr int64_t kMark[] = {0x7c1d5e90b3a64f28, -0x2b8f03d6c59e174b};
  static constexpr int64_t kMarkWords = std::size(kMark), kWords = kMarkWords + 1;
  static constexpr size_t kDim = 4;  // no list that an op takes has tensors of 4 dimensions

  explicit KeptList(Tensors tensors) : tensors_(std::move(tensors)) {
    std::copy_n(kMark, kMarkWords, words_);
    words_[kMarkWords] = address(words_);
  }
  static int64_t address(const int64_t* words) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(words));
  }
  static void free(void* words) {
    // Memory that is used again must not look like a list; a plain write would be optimized away.
    *static_cast<volatile int64_t*>(words) = 0;
    delete static_cast<KeptList*>(words);
  }

  int64_t words_[kWords];  // first, since its address is the object's
  Tensors tensors_;
};

}  // namespace sparsekit::ops
