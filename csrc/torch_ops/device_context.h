// Selects the engine that torch_ops calls. The same files are compiled once for each engine:
//   SPARSEKIT_ENGINE_CPU   ops of `sparsekit` on CPU tensors, computed by sparsekit::cpu
//   SPARSEKIT_ENGINE_CUDA  ops of `sparsekit` on CUDA tensors, computed by sparsekit::cuda
//   SPARSEKIT_ENGINE_SIMT  ops of `sparsekit_simt` on CPU tensors, computed by the CUDA kernels on
//   the host
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "common.h"
#include "sparsekit/device_count.h"
#include "sparsekit/device_memory.h"

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
// Adds a level of macro expansion, since torch's macro pastes its arguments.
#define SPARSEKIT_LIBRARY_(ns, m) STABLE_TORCH_LIBRARY(ns, m)
#define SPARSEKIT_LIBRARY(m) SPARSEKIT_LIBRARY_(SPARSEKIT_NAMESPACE, m)
#define SPARSEKIT_LIBRARY_IMPL_(ns, key, m) STABLE_TORCH_LIBRARY_IMPL(ns, key, m)
#define SPARSEKIT_LIBRARY_IMPL(m) \
  SPARSEKIT_LIBRARY_IMPL_(SPARSEKIT_NAMESPACE, SPARSEKIT_DISPATCH_KEY, m)

namespace sparsekit::ops {

// Lists the kinds of invalid values that only the device can detect. Error messages name the op and
// the argument listed here.
#define SPARSEKIT_DEVICE_ERRORS(X)                         \
  X(kNewRow, "hash_table_renumber_", "new_rows")           \
  X(kGatherRow, "gather_rows", "rows")                     \
  X(kInitRow, "init_rows_", "rows")                        \
  X(kUpdateRow, "update_rows_", "rows")                    \
  X(kCatchUpRow, "catch_up_rows_", "rows")                 \
  X(kSegmentId, "unsorted_segment_sum", "segment_ids")     \
  X(kBagOffset, "embedding_bag", "offsets")                \
  X(kBagRow, "embedding_bag", "rows")                      \
  X(kGroupOffset, "group_find", "offsets")                 \
  X(kGroupBag, "group_find", "max_nnz of bag")             \
  X(kGroupKey, "group_find", "keys")                       \
  X(kGroupRefused, "group_find_or_insert_", "tables")      \
  X(kGroupIndex, "group_embedding_bag_", "index")          \
  X(kOwner, "bucketize", "owners")                         \
  X(kGroupOwners, "group_bucketize", "owners of table")    \
  X(kGroupMaxKeys, "group_bucketize", "max_keys_per_rank") \
  X(kExchangePlace, "group_exchange_rows", "places")       \
  X(kExchangeTable, "group_exchange_rows", "come")         \
  X(kMovedRow, "move_rows_", "new_rows")                   \
  X(kGoneRow, "compact_rows", "gone")

enum class DeviceError {
#define SPARSEKIT_NAME(name, op, argument) name,
  SPARSEKIT_DEVICE_ERRORS(SPARSEKIT_NAME)
#undef SPARSEKIT_NAME
};

#define SPARSEKIT_ONE(name, op, argument) +1
constexpr int64_t kNumErrors = 0 SPARSEKIT_DEVICE_ERRORS(SPARSEKIT_ONE);
#undef SPARSEKIT_ONE

#if defined(SPARSEKIT_ENGINE_CPU)

constexpr bool kOnDevice = false;

class DeviceContext {
 public:
  explicit DeviceContext(const Tensor&) {}
  void* stream() const { return nullptr; }
  int64_t* error_word(DeviceError) const { return nullptr; }
  int64_t* error_words() const { return nullptr; }
  bool capturing() const { return false; }
  int64_t error_position(DeviceError, int64_t) const { return -1; }
  int64_t value(const Tensor& words, int64_t i) const {
    switch (dtype_of(words)) {
      case ScalarType::Short:
        return data<int16_t>(words)[i];
      case ScalarType::Int:
        return data<int32_t>(words)[i];
      default:
        return int64_data(words)[i];
    }
  }
  const void* cached_copy(const void*, int64_t) const { return nullptr; }
  cuda::KeepOnDevice keeper() const { return {}; }
  void read(const int64_t* words, int64_t count, int64_t* host) const {
    std::copy(words, words + count, host);
  }
};

#else

constexpr bool kOnDevice = true;

// Keeps a call's device and stream current as long as this object exists. Workspace comes from
// torch's allocator, which ties memory to the current stream. So an op may free its workspace as
// soon as its kernels are launched.
//
// Kernels report invalid values in one word per device and kind of error; the word holds the
// smallest bad position. Reading the words means waiting for the device, so a call reads them only
// with checks on (SPARSEKIT_CHECKED=1 or sparsekit.checked(True)). With checks off, lookups copy
// the words to the host without waiting (sparsekit/tables/reports.py), and a call that waits for
// the device for another reason throws the error.
class DeviceContext {
 public:
  explicit DeviceContext(const Tensor& on);
  ~DeviceContext();

  void* stream() const { return stream_; }
  int64_t* error_word(DeviceError error) const;
  // Returns the position, below `limit`, that a kernel of this call has reported, or -1 if there is
  // none. Always returns -1 with checks off and while a graph is captured.
  int64_t error_position(DeviceError error, int64_t limit) const;
  // Returns the kNumErrors error words.
  int64_t* error_words() const { return error_words_; }
  bool capturing() const;
  // Returns an element of an int64, int32 or int16 tensor on the device.
  int64_t value(const Tensor& words, int64_t i) const;
  // Returns a copy of these bytes on the device, for kernels that are launched while this object
  // lives. They must not write to it. A recent copy of the same bytes on this stream is reused, so
  // bytes that do not change from step to step are copied only once.
  const void* cached_copy(const void* bytes, int64_t count) const;
  // Returns cached_copy() as a function for core.
  cuda::KeepOnDevice keeper() const;
  // Copies `count` words to the host, and throws the error reported by an earlier call, if any.
  void read(const int64_t* device, int64_t count, int64_t* host) const;

 private:
  void begin() const;
  bool checking() const;
  void raise_left_over(const int64_t* positions) const;

  struct Guard;
  std::unique_ptr<Guard> guard_;
  Tensor on_;
  mutable std::vector<Tensor> copies_;  // results of cached_copy()
  void* stream_ = nullptr;
  int64_t* error_words_ = nullptr;
};

#endif

// Owns the workspace for a call to core, on the engine's device. It may have zero bytes.
class Workspace {
 public:
  Workspace(int64_t bytes, const Tensor& beside) {
    // Keep small workspaces on the stack: making a tensor takes as long as an op on a few keys.
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

}  // namespace sparsekit::ops
