#include "sparsekit/device_memory.h"

#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/descriptors.cuh"
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
    // The error means that `stream` is the legacy stream and another stream is being captured.
    (void)cudaGetLastError();
    return true;
  }
  simt::check(error, "capture status");
  return status != cudaStreamCaptureStatusNone;
}

namespace {

struct Buffer {
  char* bytes;
  int64_t size;
};

// A buffer for the copies of one call. It is page-locked, so that the copies are asynchronous and
// the call waits only once. Buffers are reused by the calls of all threads and never freed: when
// the process ends, the driver may already be gone.
class Staging {
 public:
  explicit Staging(int64_t bytes) {
    {
      const std::lock_guard<std::mutex> lock(mutex());
      if (!kept().empty()) {
        buffer_ = kept().back();
        kept().pop_back();
      }
    }
    if (bytes > buffer_.size) allocate(bytes > 4096 ? bytes : 4096);
  }
  ~Staging() {
    const std::lock_guard<std::mutex> lock(mutex());
    kept().push_back(buffer_);
  }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  char* at(int64_t position) const { return buffer_.bytes + position; }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::vector<Buffer>& kept() {
    static auto* kept = new std::vector<Buffer>;
    return *kept;
  }

  void allocate(int64_t bytes) {
    // In other capture modes, this allocation would invalidate a graph that another thread is
    // capturing.
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    simt::check(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
    void* memory = nullptr;
    const cudaError_t error = cudaMallocHost(&memory, static_cast<size_t>(bytes));
    simt::check(cudaThreadExchangeStreamCaptureMode(&mode), "capture mode");
    simt::check(error, "page-locked memory");
    if (buffer_.bytes != nullptr) (void)cudaFreeHost(buffer_.bytes);
    buffer_ = {static_cast<char*>(memory), bytes};
  }

  Buffer buffer_{};
};

}  // namespace

void read_back(const Piece* pieces, int count, void* stream) {
  ++waits;
  int64_t used = 0;
  for (int i = 0; i < count; ++i) used += pieces[i].bytes;
  const Staging staging(used);
  used = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].bytes == 0) continue;
    simt::check(cudaMemcpyAsync(staging.at(used), pieces[i].device, pieces[i].bytes,
                                cudaMemcpyDeviceToHost, static_cast<cudaStream_t>(stream)),
                "copy to the host");
    used += pieces[i].bytes;
  }
  simt::check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "synchronise");
  used = 0;
  for (int i = 0; i < count; ++i) {
    if (pieces[i].bytes == 0) continue;
    std::memcpy(pieces[i].host, staging.at(used), pieces[i].bytes);
    used += pieces[i].bytes;
  }
}
#else
bool is_capturing(void*) {
  return simt::host::is_recording();
}

void read_back(const Piece* pieces, int count, void*) {
  // Throw an error while a graph is being captured, as CUDA would on a device.
  if (is_capturing(nullptr)) throw std::runtime_error("simt: a wait while a graph is captured");
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
#endif

void copy_to_device(void* device, const void* host, int64_t bytes, void* stream) {
  Descriptors copy(device);
  const auto* begin = static_cast<const char*>(host);
  copy.add(std::vector<char>(begin, begin + bytes));
  copy.send(stream);
}

}  // namespace sparsekit::cuda
