// A pool of memory for large CPU tensors, in pages of 2 MiB where the system supports them. It
// keeps the memory of freed tensors for new tensors. Without the pool, torch's CPU allocator would
// return large blocks to the system immediately. The system provides new memory page by page at the
// first access, and fills it with zeros; this can take longer than the op itself.
#pragma once

#include <cstddef>

namespace sparsekit::ops {

// Minimum size in bytes of blocks that the pool keeps.
constexpr size_t kLargeBytes = size_t{2} << 20;

// Returns a block of at least `bytes` uninitialised bytes, or nullptr if there is not enough
// memory. Thread-safe.
void* take_large_memory(size_t bytes);

// Returns a block from take_large_memory to the pool. Thread-safe.
void give_back_large_memory(void* memory);

// Advises the system to use pages of 2 MiB for memory that has not been accessed yet. This is only
// a hint.
void prefer_huge_pages(void* memory, size_t bytes);

}  // namespace sparsekit::ops
