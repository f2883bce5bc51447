// Parts of the one block of workspace that a caller passes in.
#pragma once

#include <cstdint>

namespace sparsekit {

// Hands out the parts in turn, each at a multiple of kAlignment bytes. Over a null block it only
// counts, so one piece of code says both how much is needed and where everything lies.
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

  // Bytes of all that Parts takes, which is made of an arena and of what sizes depend on.
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
