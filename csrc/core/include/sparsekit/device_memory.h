// Copies small values between host and device. read_back() waits for the stream, so ops call it
// only where the host must know the size of a result or whether an error occurred.
#pragma once

#include <cstdint>
#include <functional>

#include "sparsekit/host_device.h"

namespace sparsekit::cuda {

// Initial value of an error position; it means that no error was found. All bytes are equal, so
// that a memset can set it.
constexpr int kNoPositionByte = 0x7F;
constexpr int64_t kNoPosition = 0x7F7F7F7F7F7F7F7F;

// In ops on several tables, an error position holds the table in its upper bits and the position
// within the table in its lower bits. So the smallest value is the first error of the first bad
// table.
constexpr int kPositionBits = 40;
SPARSEKIT_HOST_DEVICE inline int64_t position_of_table(int64_t table, int64_t position) {
  return table << kPositionBits | position;
}
inline int64_t table_of_position(int64_t both) {
  return both >> kPositionBits;
}
inline int64_t position_in_table(int64_t both) {
  return both & ((int64_t{1} << kPositionBits) - 1);
}

// Fills device memory with copies of one byte, in stream order. Does not wait.
void fill_bytes(void* device, int byte, int64_t bytes, void* stream);

// Returns true while the stream is being captured into a CUDA graph; waiting is then forbidden.
bool is_capturing(void* stream);

struct Piece {
  void* host;
  const void* device;
  int64_t bytes;
};

// Copies a few small pieces of device memory to the host, with a single wait for all of them.
void read_back(const Piece* pieces, int count, void* stream);

// Copies host memory to the device by launches, in stream order and without a wait. `device` must
// have room for a multiple of 16 bytes. The caller may reuse `host` immediately.
void copy_to_device(void* device, const void* host, int64_t bytes, void* stream);

// Returns a copy of host memory in device memory, for the kernels that the calling op launches.
// Bytes that are the same in each step are copied once.
using KeepOnDevice = std::function<const void*(const void* host, int64_t bytes)>;

// Returns the number of times that read_back() has waited in this process.
int64_t num_waits();

}  // namespace sparsekit::cuda
