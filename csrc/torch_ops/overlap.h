// Refuses outputs that share memory with other arguments of an op: a kernel that has checked a
// size, a key or a row number relies on it while it writes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "device_context.h"

namespace sparsekit::ops {

// The bytes from a tensor's first element to its last one, and how the rows of a matrix lie in
// them.
struct Span {
  uintptr_t begin = 0, end = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;  // 0 unless it is a matrix of several rows that lie apart

  Span() = default;

  explicit Span(const Tensor& tensor) {
    const int64_t count = tensor.numel();
    if (count == 0) return;
    const auto element = static_cast<int64_t>(tensor.element_size());
    begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    row_bytes = count * element;
    if (tensor.is_contiguous()) {
      end = begin + static_cast<uintptr_t>(row_bytes);
      return;
    }
    row_bytes = element;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      row_bytes += (tensor.size(d) - 1) * tensor.stride(d) * element;
    }
    end = begin + static_cast<uintptr_t>(row_bytes);
    if (tensor.dim() == 2 && tensor.size(0) > 1 && (tensor.size(1) == 1 || tensor.stride(1) == 1)) {
      row_bytes = tensor.size(1) * element;
      stride_bytes = tensor.stride(0) * element;
    }
  }

  bool overlaps(const Span& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    if (stride_bytes <= 0 || stride_bytes != other.stride_bytes) return true;
    // Rows that are equally far apart, as the states of an optimizer are: where rows of the one
    // that begins later lie between rows of the other, no element is shared.
    const Span& first = begin <= other.begin ? *this : other;
    const Span& second = begin <= other.begin ? other : *this;
    const auto apart = static_cast<int64_t>(second.begin - first.begin) % stride_bytes;
    return apart < first.row_bytes || apart + second.row_bytes > stride_bytes;
  }
};

// Raises, in check(), when an argument that an op writes to overlaps another one. Arguments that it
// only reads may overlap one another.
class Overlaps {
 public:
  explicit Overlaps(const char* op) : op_(op) {}

  void written(const char* name, const Tensor& tensor) { add(name, tensor, true); }
  void read(const char* name, const Tensor& tensor) { add(name, tensor, false); }
  void written(const char* name, const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) written(name, *tensor);
  }
  void read(const char* name, const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) read(name, *tensor);
  }
  void written(const char* list, const std::vector<Tensor>& tensors) { add(list, tensors, true); }
  void read(const char* list, const std::vector<Tensor>& tensors) { add(list, tensors, false); }
  // Arguments added from here on belong to this table, for an op on several.
  void of_table(size_t table) { table_ = static_cast<int64_t>(table); }

  void check() const {
    constexpr size_t kFew = 16;
    if (arguments_.size() > kFew && !any()) return;
    for (size_t i = 1; i < arguments_.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (!clash(arguments_[i], arguments_[j])) continue;
        ops::check(false, op_, ": ", name(i), " overlaps ", name(j),
                   " in memory, but what is written to must not be part of another argument");
      }
    }
  }

 private:
  struct Argument {
    const char* name = nullptr;
    int64_t table = -1;
    Span span;
    bool is_written = false;
    int64_t position = -1;  // in a list
  };

  void add(const char* name, const Tensor& tensor, bool is_written) {
    arguments_.push_back({name, table_, Span(tensor), is_written});
  }
  void add(const char* list, const std::vector<Tensor>& tensors, bool is_written) {
    arguments_.reserve(arguments_.size() + tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      arguments_.push_back({list, table_, Span(tensors[i]), is_written, static_cast<int64_t>(i)});
    }
  }
  std::string name(size_t i) const {
    const Argument& argument = arguments_[i];
    if (argument.position >= 0)
      return message(Item{argument.name, static_cast<size_t>(argument.position)});
    if (argument.table < 0) return argument.name;
    return message(argument.name, " of table ", argument.table);
  }
  static bool clash(const Argument& one, const Argument& other) {
    return (one.is_written || other.is_written) && one.span.overlaps(other.span);
  }

  // Looks for any overlap: in the order of the addresses where arguments begin, each is compared
  // with those that have not ended there.
  bool any() const {
    struct Begin {
      uintptr_t address;
      size_t argument;
    };
    std::vector<Begin> begins;
    begins.reserve(arguments_.size());
    for (size_t i = 0; i < arguments_.size(); ++i) begins.push_back({arguments_[i].span.begin, i});
    std::sort(begins.begin(), begins.end(),
              [](const Begin& one, const Begin& other) { return one.address < other.address; });
    std::vector<const Argument*> writes, reads;
    const auto clashes = [](std::vector<const Argument*>& earlier, const Argument& argument) {
      const auto ended = [&](const Argument* other) {
        return other->span.end <= argument.span.begin;
      };
      earlier.erase(std::remove_if(earlier.begin(), earlier.end(), ended), earlier.end());
      return std::any_of(earlier.begin(), earlier.end(),
                         [&](const Argument* other) { return clash(argument, *other); });
    };
    for (const Begin& begin : begins) {
      const Argument& argument = arguments_[begin.argument];
      if (clashes(writes, argument)) return true;
      if (argument.is_written && clashes(reads, argument)) return true;
      (argument.is_written ? writes : reads).push_back(&argument);
    }
    return false;
  }

  const char* op_;
  int64_t table_ = -1;
  std::vector<Argument> arguments_;
};

}  // namespace sparsekit::ops
