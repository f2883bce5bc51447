// Mapped memory, which is unmapped when its last owner is destroyed.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace sparsekit::serving {

class Memory {
 public:
  Memory() = default;
  Memory(void* data, size_t bytes) : data_(data == MAP_FAILED ? nullptr : data), bytes_(bytes) {}
  ~Memory() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
  }
  Memory(Memory&& other) noexcept { *this = std::move(other); }
  Memory& operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }

  // Returns zeroed memory, in huge pages where available. The result is empty on failure.
  static Memory zeros(size_t bytes) {
    Memory memory(
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), bytes);
    if (memory.data_ != nullptr) ::madvise(memory.data_, bytes, MADV_HUGEPAGE);
    return memory;
  }

  explicit operator bool() const { return data_ != nullptr; }
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace sparsekit::serving
