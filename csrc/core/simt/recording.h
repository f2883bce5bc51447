// Records a thread's requests to the device instead of executing them; the recording can be
// executed later any number of times, like a CUDA graph. Tests use the functions at the end of
// recording.cpp (tests/graphs.py).
#pragma once

#include <cstdint>
#include <functional>

namespace sparsekit::simt::host {

// Returns true if the calling thread is recording. Nothing may then wait for the device.
bool is_recording();
void record(std::function<void()> request);
// Returns memory that lives as long as the recording.
void* recorded_memory(int64_t bytes);

}  // namespace sparsekit::simt::host
