// The few words that pass between host and device. All wait for the stream, so ops use them only
// where a result's size or an error must be known on the host.
#pragma once

#include <cstdint>

namespace sparsekit::cuda {

// What position words hold while nothing bad was found: every byte the same, so that a fill sets
// it.
constexpr int kNoPositionByte = 0x7F;
constexpr int64_t kNoPosition = 0x7F7F7F7F7F7F7F7F;

// Fills device memory with one byte, in the order of the stream. Does not wait.
void fill_bytes(void* device, int byte, int64_t bytes, void* stream);

// Whether work on the stream is being recorded in a CUDA graph, when nothing may wait for it.
bool is_capturing(void* stream);

struct Piece {
  void* host;
  const void* device;
  int64_t bytes;
};

// Copies a few small pieces to the host and waits for them, once.
void read_back(const Piece* pieces, int count, void* stream);

// How often read_back has waited in this process.
int64_t num_waits();

}  // namespace sparsekit::cuda
