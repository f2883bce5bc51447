// Parts of the one block of workspace that a caller passes in.
#pragma once

#include <cstdint>

namespace sparsekit::cuda {

// Hands out the parts in turn, each aligned to 256 bytes. Over a null block it only counts, so one
// piece of code says both how much is needed and where everything lies.
class Arena {
 public:
  explicit Arena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    const int64_t offset = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + offset);
  }

  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

}  // namespace sparsekit::cuda
