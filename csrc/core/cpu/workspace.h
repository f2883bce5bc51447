// Parts of the one block of workspace that a caller passes in.
#pragma once

#include <cstdint>

namespace sparsekit::cpu {

// Hands out workspace in multiples of 64 bytes; over a null block, counts how much there must be.
class Workspace {
 public:
  explicit Workspace(void* memory) : begin_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    char* taken = begin_ + used_;
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(taken);
  }

  int64_t used() const { return used_; }

 private:
  char* begin_;
  int64_t used_ = 0;
};

}  // namespace sparsekit::cpu
