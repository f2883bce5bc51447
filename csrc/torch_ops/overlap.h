// What an op writes to must not share memory with its other arguments: a kernel that has checked a
// size, a key or a row number relies on it while it writes.
#pragma once

#include <cstdint>
#include <optional>

#include "engine.h"

namespace sparsekit::ops {

// The bytes from a tensor's first element to its last one, and how the rows of a matrix lie in
// them.
struct Span {
  uintptr_t begin = 0, end = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;  // 0 unless it is a matrix of several rows

  Span() = default;

  explicit Span(const Tensor& tensor) {
    const int64_t count = tensor.numel();
    if (count == 0) return;
    const auto element = static_cast<int64_t>(tensor.element_size());
    begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    int64_t bytes = count * element;
    if (!tensor.is_contiguous()) {
      bytes = element;
      for (int64_t d = 0; d < tensor.dim(); ++d) {
        bytes += (tensor.size(d) - 1) * tensor.stride(d) * element;
      }
    }
    end = begin + static_cast<uintptr_t>(bytes);
    row_bytes = bytes;
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

// Raises when an argument that an op writes to overlaps another one. Arguments that it only reads
// may overlap one another.
class Overlaps {
 public:
  explicit Overlaps(const char* op) : op_(op) {}

  void written(const char* name, const Tensor& tensor) { add({name, Span(tensor), true}); }
  void read(const char* name, const Tensor& tensor) { add({name, Span(tensor), false}); }
  void written(const char* name, const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) written(name, *tensor);
  }
  void read(const char* name, const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) read(name, *tensor);
  }

 private:
  struct Argument {
    const char* name = nullptr;
    Span span;
    bool is_written = false;
  };
  static constexpr int kMost = 9;  // update_rows_ has the most

  void add(const Argument& argument) {
    for (int i = 0; i < count_; ++i) {
      const Argument& other = arguments_[i];
      check(!(argument.is_written || other.is_written) || !argument.span.overlaps(other.span), op_,
            ": ", argument.name, " overlaps ", other.name,
            " in memory, but what is written to must not be part of another argument");
    }
    check(count_ < kMost, op_, ": more arguments than there can be");
    arguments_[count_++] = argument;
  }

  const char* op_;
  int count_ = 0;
  Argument arguments_[kMost];
};

}  // namespace sparsekit::ops
