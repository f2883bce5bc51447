// The learning rate of an optimizer's step.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit {

// A learning rate: a number, or the address of a number that is read when a step is computed. With
// an address in device memory, CUDA graph replays follow a changing learning rate.
class Rate {
 public:
  SPARSEKIT_HOST_DEVICE Rate(double value) : value_(value) {}
  explicit Rate(const float* address) : single_(address), source_(Source::kSingle) {}
  explicit Rate(const double* address) : double_(address), source_(Source::kDouble) {}

  SPARSEKIT_HOST_DEVICE operator double() const {
    if (source_ == Source::kValue) return value_;
    return source_ == Source::kSingle ? static_cast<double>(*single_) : *double_;
  }

 private:
  enum class Source : int32_t { kValue, kSingle, kDouble };
  union {  // a union, since launches have little room for parameters
    double value_;
    const float* single_;
    const double* double_;
  };
  Source source_ = Source::kValue;
};

}  // namespace sparsekit
