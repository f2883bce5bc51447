#include "sparsekit/device_memory.h"

#include <atomic>
#include <cstring>

#include "cuda/simt.cuh"

namespace sparsekit::cuda {
namespace {

std::atomic<int64_t> waits{0};

}  // namespace

int64_t num_waits() {
  return waits;
}

void fill_bytes(void* device, int byte, int64_t bytes, void* stream) {
  simt::fill_bytes(device, byte, bytes, stream);
}

#ifdef __CUDACC__
bool is_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status);
  if (error == cudaErrorStreamCaptureImplicit) {
    // `stream` is the legacy stream, and another stream is being captured.
    (void)cudaGetLastError();
    return true;
  }
  simt::check(error, "capture status");
  return status != cudaStreamCaptureStatusNone;
}

void read_back(const Piece* pieces, int count, void* stream) {
  // Page-locked, so that the copies are asynchronous and one wait is enough. The buffer is freed
  // only to allocate a larger one: when a thread ends, the driver may already be gone.
  thread_local char* staging = nullptr;
  thread_local int64_t size = 0;
  ++waits;
  int64_t used = 0;
  for (int i = 0; i < count; ++i) used += pieces[i].bytes;
  if (used > size) {
    if (staging != nullptr) simt::check(cudaFreeHost(staging), "page-locked memory");
    staging = nullptr;
    size = 0;
    const int64_t wanted = used > 4096 ? used : 4096;
    simt::check(cudaMallocHost(&staging, static_cast<size_t>(wanted)), "page-locked memory");
    size = wanted;
  }
  used = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].bytes == 0) continue;
    simt::check(cudaMemcpyAsync(staging + used, pieces[i].device, pieces[i].bytes,
                                cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)),
                "copy to the host");
    used += pieces[i].bytes;
  }
  simt::check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "synchronise");
  used = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].bytes == 0) continue;
    std::memcpy(pieces[i].host, staging + used, pieces[i].bytes);
    used += pieces[i].bytes;
  }
}

void copy_to_device(void* device, const void* host, int64_t bytes, void* stream) {
  simt::check(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice,
                              static_cast<cudaStream_t>(stream)),
              "copy to the device");
}
#else
bool is_capturing(void*) {
  return false;
}

void read_back(const Piece* pieces, int count, void*) {
  ++waits;
  int64_t bytes = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].bytes == 0) continue;
    const auto size = static_cast<size_t>(pieces[i].bytes);
    if (simt::host::lacks_memory(pieces[i].device)) {
      std::memset(pieces[i].host, 0, size);
    } else {
      std::memcpy(pieces[i].host, pieces[i].device, size);
    }
    bytes += pieces[i].bytes;
  }
  simt::host::note(simt::host::Request::kReadBack, "read back", bytes, 0);
}

void copy_to_device(void* device, const void* host, int64_t bytes, void*) {
  if (!simt::host::lacks_memory(device)) std::memcpy(device, host, static_cast<size_t>(bytes));
  // Like a memset, this is queued on the stream without a wait.
  simt::host::note(simt::host::Request::kMemset, "copy to the device", 0, bytes);
}
#endif

}  // namespace sparsekit::cuda
