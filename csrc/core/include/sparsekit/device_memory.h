// The few words that pass between host and device. read_back waits for the stream, so ops use it
// only where a result's size or an error must be known on the host.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"

namespace sparsekit::cuda {

// Value of a position word while nothing bad was found: all bytes are equal, so a memset sets it.
constexpr int kNoPositionByte = 0x7F;
constexpr int64_t kNoPosition = 0x7F7F7F7F7F7F7F7F;

// The same for an op on several tables: the position in one of them, after all of the tables
// before.
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

// Fills device memory with one byte, in the order of the stream. Does not wait.
void fill_bytes(void* device, int byte, int64_t bytes, void* stream);

// True while the stream is recorded into a CUDA graph, when nothing may wait for it.
bool is_capturing(void* stream);

struct Piece {
  void* host;
  const void* device;
  int64_t bytes;
};

// Copies a few small pieces to the host and waits for them, once.
void read_back(const Piece* pieces, int count, void* stream);

// Copies to the device, in the order of the stream. The host's memory may change right after.
void copy_to_device(void* device, const void* host, int64_t bytes, void* stream);

// Counts the waits of read_back in this process.
int64_t num_waits();

}  // namespace sparsekit::cuda
