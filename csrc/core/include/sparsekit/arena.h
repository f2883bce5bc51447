// Divides a single block of workspace, provided by the caller, into parts.
#pragma once

#include <cstdint>

namespace sparsekit {

// Bump allocator over the workspace. Each part begins at a multiple of kAlignment bytes. If
// `memory` is null, the arena only counts bytes, so the code that lays out the workspace also
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

  // Returns the workspace size in bytes for the type Parts, whose constructor takes an arena and
  // `sizes`.
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
