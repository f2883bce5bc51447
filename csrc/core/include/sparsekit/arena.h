// Cuts the one block of workspace that a caller passes in into parts.
#pragma once

#include <cstdint>

namespace sparsekit {

// An allocator that hands out the parts in turn, each at a multiple of kAlignment bytes.
// Constructed with null, it only counts bytes, so the code that lays out the workspace also
// computes its size.
template <int64_t kAlignment>
class BasicArena {
 public:
  explicit BasicArena(void* memory = nullptr) : memory_(static_cast<char*>(memory)) {}

  template <class T>
  T* take(int64_t count) {
    const int64_t offset = bytes_;
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
    return memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + offset);
  }

  int64_t bytes() const { return bytes_; }

  // Returns the bytes that Parts takes; its constructor receives an arena and `sizes`.
  template <class Parts, class... Sizes>
  static int64_t bytes_of(const Sizes&... sizes) {
    BasicArena arena;
    static_cast<void>(Parts(arena, sizes...));
    return arena.bytes();
  }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

namespace cpu {
using Arena = BasicArena<64>;
}
namespace cuda {
using Arena = BasicArena<256>;
}

}  // namespace sparsekit
