// Lists of tensors that Python passes again and again. Converting hundreds of tensors, and querying
// torch about each, takes longer than the ops themselves. So the op `kept_list` converts them once
// and returns a tensor; a list with only this tensor can be passed in place of the original list.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <iterator>
#include <memory>
#include <mutex>
#include <utility>

#include "arguments.h"

namespace sparsekit::ops {

// The views are valid as long as the tensors exist.
inline std::vector<View> views_of(const Tensors& tensors, bool are_kept) {
  std::vector<View> views;
  views.reserve(tensors.size());
  for (const Tensor& tensor : tensors) views.emplace_back(tensor, are_kept);
  return views;
}

class KeptList {
 public:
  static Tensor make(Tensors tensors) {
    auto* list = new KeptList(std::move(tensors));
    const int64_t sizes[] = {kWords, 1, 1, 1}, strides[] = {1, 1, 1, 1};
    return torch::stable::from_blob(list->words_, {sizes, kDim}, {strides, kDim},
                                    torch::stable::Device(torch::headeronly::DeviceType::CPU),
                                    ScalarType::Long, &KeptList::free);
  }

  // Returns the kept list that the only item of `given` represents, or null.
  static KeptList* of(const Tensors& given) {
    if (given.size() != 1 || given[0].dim() != kDim) return nullptr;
    const Tensor& item = given[0];
    if (!item.is_cpu() || dtype_of(item) != ScalarType::Long) return nullptr;
    if (!item.is_contiguous() || item.numel() != kWords) return nullptr;
    const int64_t* words = int64_data(item);
    // A copy of the words has a different address. Such a copy does not keep the tensors alive, so
    // it does not represent the list.
    if (!std::equal(kMark, kMark + kMarkWords, words) || words[kMarkWords] != address(words)) {
      return nullptr;
    }
    return reinterpret_cast<KeptList*>(const_cast<int64_t*>(words));
  }

  // A snapshot of the tensors. Aliases keep the tensors' memory alive, so no other memory can get
  // the same address.
  struct Facts {
    Tensors aliases;
    std::vector<View> views;
    uint64_t id;

    explicit Facts(const Tensors& tensors) {
      aliases.reserve(tensors.size());
      for (const Tensor& tensor : tensors) aliases.push_back(detached(tensor));
      views = views_of(aliases, true);
      static std::atomic<uint64_t> count{0};
      id = ++count;
    }
  };

  // Returns the current tensors. A tensor whose memory has been replaced is recognized by its new
  // address. A tensor with a new shape in the same memory keeps its old facts, as if the op had
  // begun before the change.
  std::shared_ptr<const Facts> current() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (tensors_[i].mutable_data_ptr() == facts_->views[i].mutable_data_ptr()) continue;
      facts_ = std::make_shared<const Facts>(tensors_);
      break;
    }
    return facts_;
  }

 private:
  static constexpr int64_t kMark[] = {0x7c1d5e90b3a64f28, -0x2b8f03d6c59e174b};
  static constexpr int64_t kMarkWords = std::size(kMark), kWords = kMarkWords + 1;
  static constexpr size_t kDim = 4;  // no op takes a list of 4-dimensional tensors

  explicit KeptList(Tensors tensors)
      : tensors_(std::move(tensors)), facts_(std::make_shared<const Facts>(tensors_)) {
    std::copy_n(kMark, kMarkWords, words_);
    words_[kMarkWords] = address(words_);
  }
  static int64_t address(const int64_t* words) {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(words));
  }
  static void free(void* words) {
    // Erase the mark, so that this memory does not look like a list when it is reused. A plain
    // write would be optimized away.
    *static_cast<volatile int64_t*>(words) = 0;
    delete static_cast<KeptList*>(words);
  }
  static Tensor detached(const Tensor& tensor) {
    std::array<StableIValue, 1> stack{torch::stable::detail::from(tensor)};
    STABLE_TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::detach", "", stack.data(), TORCH_ABI_VERSION));
    return torch::stable::detail::to<Tensor>(stack[0]);
  }

  int64_t words_[kWords];  // first, since its address is the object's
  Tensors tensors_;
  std::mutex mutex_;
  std::shared_ptr<const Facts> facts_;
};

// Facts about the tensors of a list, or of the list represented by its only item. Valid as long as
// the list exists.
class Views {
 public:
  explicit Views(const Tensors& given) {
    if (KeptList* kept = KeptList::of(given)) {
      kept_ = kept->current();
    } else {
      own_ = views_of(given, false);
    }
  }

  size_t size() const { return views().size(); }
  bool empty() const { return views().empty(); }
  const View& operator[](size_t i) const { return views()[i]; }
  const View* begin() const { return views().data(); }
  const View* end() const { return begin() + size(); }

  // Identifies the tensors of a kept list; 0 for other lists.
  uint64_t id() const { return kept_ ? kept_->id : 0; }

  // Replaces tensor i with another tensor.
  void replace(size_t i, const Tensor& tensor) {
    if (const auto kept = std::exchange(kept_, nullptr)) {
      for (const View& view : kept->views) own_.emplace_back(view.tensor());
      replaced_ = kept;
    }
    own_[i] = View(tensor);
  }

 private:
  const std::vector<View>& views() const { return kept_ ? kept_->views : own_; }

  std::shared_ptr<const KeptList::Facts> kept_, replaced_;
  std::vector<View> own_;
};

}  // namespace sparsekit::ops
