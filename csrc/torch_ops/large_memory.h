// Memory of large CPU tensors: it is in pages of 2 MiB where the system has them, and is kept for
// the next tensor when a tensor is freed. The system hands out new memory page by page at the first
// touch, filled with zeros, which can take longer than the op itself; and torch's CPU allocator
// returns large blocks to the system at once.
#pragma once

#include <cstddef>

namespace sparsekit::ops {

// Blocks of at least this size are kept.
constexpr size_t kLargeBytes = size_t{2} << 20;

// Returns at least this many uninitialised bytes, or nullptr if there is no memory. Thread-safe.
void* take_large_memory(size_t bytes);

// Gives back memory of take_large_memory, which keeps it for later.
void give_back_large_memory(void* memory);

// Advises the system to use pages of 2 MiB for memory that has not been touched yet. It is only a
// hint.
void prefer_huge_pages(void* memory, size_t bytes);

}  // namespace sparsekit::ops
