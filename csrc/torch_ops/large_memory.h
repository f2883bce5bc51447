// Memory of large CPU tensors: in pages of 2 MiB where the system has them, and kept for the next
// tensor when one goes. The system hands new memory out page by page as it is first touched, filled
// with zeros, which can take longer than what an op does with it; and torch's CPU allocator returns
// large blocks at once.
#pragma once

#include <cstddef>

namespace sparsekit::ops {

// From this size on a block is worth keeping.
constexpr size_t kLargeBytes = size_t{2} << 20;

// At least this many bytes with any content, or nullptr when there is no memory. Any thread.
void* take_large_memory(size_t bytes);

// Gives back memory of take_large_memory.
void give_back_large_memory(void* memory);

// Asks for pages of 2 MiB in memory that has not been touched yet. A hint, which may be ignored.
void prefer_huge_pages(void* memory, size_t bytes);

}  // namespace sparsekit::ops
