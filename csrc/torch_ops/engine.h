// Which engine a build of torch_ops calls. The same files are compiled for each:
//   SPARSEKIT_ENGINE_CPU   ops of `sparsekit` on CPU tensors, by sparsekit::cpu
//   SPARSEKIT_ENGINE_CUDA  ops of `sparsekit` on CUDA tensors, by sparsekit::cuda
//   SPARSEKIT_ENGINE_SIMT  ops of `sparsekit_simt` on CPU tensors: the CUDA kernels, run on the
//   host
#pragma once

#include <algorithm>
#include <limits>
#include <memory>

#include "common.h"
#include "sparsekit/device_count.h"

#if defined(SPARSEKIT_ENGINE_CPU)
#define SPARSEKIT_NAMESPACE sparsekit
#define SPARSEKIT_DISPATCH_KEY CPU
#elif defined(SPARSEKIT_ENGINE_CUDA)
#define SPARSEKIT_NAMESPACE sparsekit
#define SPARSEKIT_DISPATCH_KEY CUDA
#elif defined(SPARSEKIT_ENGINE_SIMT)
#define SPARSEKIT_NAMESPACE sparsekit_simt
#define SPARSEKIT_DISPATCH_KEY CPU
#endif
// A level of expansion more, since torch's macros paste their arguments.
#define SPARSEKIT_LIBRARY_(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SPARSEKIT_LIBRARY(m) SPARSEKIT_LIBRARY_(SPARSEKIT_NAMESPACE, m)
#define SPARSEKIT_LIBRARY_IMPL_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define SPARSEKIT_LIBRARY_IMPL(m) \
  SPARSEKIT_LIBRARY_IMPL_(SPARSEKIT_NAMESPACE, SPARSEKIT_DISPATCH_KEY, m)

namespace sparsekit::ops {

// What can be wrong with values that only the device sees.
enum class Complaint {
  kGatherRow,
  kInitRow,
  kUpdateRow,
  kCatchUpRow,
  kSegmentId,
  kBagOffset,
  kBagRow,
  kGroupOffset,
  kGroupBag,
  kGroupKey,
  kGroupIndex,
  kOwner,
  kGroupOwners,
  kExchangePlace,
  kExchangeTable
};

#if defined(SPARSEKIT_ENGINE_CPU)

constexpr bool kOnDevice = false;

class Engine {
 public:
  explicit Engine(const Tensor&) {}
  void* stream() const { return nullptr; }
  int64_t* bad(Complaint) const { return nullptr; }
  int64_t found(Complaint, int64_t) const { return -1; }
  int64_t value(const Tensor& words, int64_t i) const {
    return dtype_of(words) == ScalarType::Short ? data<int16_t>(words)[i] : int64_data(words)[i];
  }
  Tensor kept(const void*, int64_t) const { return {}; }
  void read(const int64_t* words, int64_t count, int64_t* host) const {
    std::copy(words, words + count, host);
  }
};

#else

constexpr bool kOnDevice = true;

// A call's device and stream: made current as long as this lives. Workspace comes from torch's
// allocator, which ties memory to the current stream, so an op may let go of it as soon as its
// kernels are launched.
//
// Kernels report the smallest bad position of each kind to a word per device. Reading that word
// means waiting for the device, so a call does it only when checks are on (SPARSEKIT_CHECKED=1 or
// sparsekit.checked(True)); else the next call that waits anyway raises the error.
class Engine {
 public:
  explicit Engine(const Tensor& on);
  ~Engine();

  void* stream() const { return stream_; }
  int64_t* bad(Complaint complaint) const;
  // The position, below `limit`, that this call's kernel has reported, or -1. Always -1 with checks
  // off and while a graph is captured.
  int64_t found(Complaint complaint, int64_t limit) const;
  // An element of an int64, int32 or int16 tensor on the device.
  int64_t value(const Tensor& words, int64_t i) const;
  // A copy of these bytes on the device, to be held until the kernels that read it are launched.
  // Nobody may write to it. It is there already if this stream has asked for the same bytes lately:
  // what is the same in every step is copied once.
  Tensor kept(const void* bytes, int64_t count) const;
  // Copies `count` words to the host, and raises what earlier calls have left.
  void read(const int64_t* device, int64_t count, int64_t* host) const;

 private:
  void begin() const;
  bool checking() const;
  void raise_left_over(const int64_t* positions) const;

  struct Guard;
  std::unique_ptr<Guard> guard_;
  Tensor on_;
  void* stream_ = nullptr;
  int64_t* complaints_ = nullptr;
};

#endif

// Memory for core that lives as long as this, where the engine is. Zero bytes are fine.
class Workspace {
 public:
  Workspace(int64_t bytes, const Tensor& beside) {
    // A tensor takes as long to make as an op with a handful of keys.
    if (!kOnDevice && bytes <= static_cast<int64_t>(sizeof small_)) return;
    large_ = new_output(beside, {bytes}, ScalarType::Byte);
    memory_ = large_->mutable_data_ptr();
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return memory_; }

 private:
  alignas(64) char small_[kOnDevice ? 1 : 16384];
  std::optional<Tensor> large_;
  void* memory_ = small_;
};

// Up to n entries: as many as the one element of `exact` says, if it is there.
inline DeviceCount device_count(int64_t n, const std::optional<Tensor>& exact, const char* op,
                                const char* name) {
  if (!exact.has_value()) return DeviceCount{n};
  check_dtype(*exact, ScalarType::Long, op, name);
  check(exact->numel() == 1, op, ": ", name, " must have one element, got ", exact->numel());
  return DeviceCount{n, int64_data(*exact)};
}

struct Named {
  const char* name;
  const Tensor& tensor;
};

// All arguments must lie where the first does; torch only looks for one kernel for all of them.
inline void check_same_device(const char* op, std::initializer_list<Named> arguments) {
  const Tensor& first = arguments.begin()->tensor;
  for (const Named& argument : arguments) {
    check(same_device(first, argument.tensor), op, ": ", argument.name, " is not on the device of ",
          arguments.begin()->name);
  }
}

// A row is cut into slices of at least 32 elements, and a grid has room for 65535 of them.
inline void check_row_size(int64_t dim, const char* op, const char* name) {
  constexpr int64_t kMost = 65535 * 32;
  check(!kOnDevice || dim <= kMost, op, ": rows of ", name, " may have at most ", kMost,
        " elements on a device, got ", dim);
}

// Entries and targets of an op that sorts. On the CPU the bound is beyond any memory and keeps
// sizes of workspace far from overflow; on a device, sort keys are 32-bit.
inline void check_sort_sizes(int64_t entries, int64_t targets, const char* op, const char* name) {
  constexpr int64_t kEnd = kOnDevice ? (int64_t{1} << 32) - 1 : int64_t{1} << 48;
  check(targets >= 0 && targets < kEnd, op, ": ", name, " must be in [0, ",
        kOnDevice ? "2^32 - 1" : "2^48", "), got ", targets);
  check(!kOnDevice || entries <= std::numeric_limits<int32_t>::max(), op, ": ", entries,
        " entries; at most 2^31 - 1 are supported");
}

}  // namespace sparsekit::ops
