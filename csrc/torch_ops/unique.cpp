#include "sparsekit/unique.h"

#include <cstring>

#include "hash_table.h"

namespace sparsekit::ops {
namespace {

// Returns the first `count` elements of a buffer. The result is a view if it covers most of the
// buffer, otherwise a copy, so that it does not keep alive much more memory than it needs. Even
// copies as small as 512 KiB should come from the pool: the first access to new memory was measured
// to take several times as long as copying.
Tensor trimmed(Tensor buffer, int64_t count) {
  const int64_t size = buffer.size(0);
  if (count == size) return buffer;
  if (!kOnDevice && count <= 512) {  // this is faster than a call into torch
    Tensor copy = new_output(buffer, {count});
    std::memcpy(copy.mutable_data_ptr(), buffer.const_data_ptr(), count * buffer.element_size());
    return copy;
  }
  Tensor view = torch::stable::narrow(buffer, 0, 0, count);
  if (2 * count > size) return view;
  Tensor copy = new_output(buffer, {count}, std::nullopt, kLargeBytes / 4);
  return torch::stable::copy_(copy, view);
}

// Results, each as long as the input. Only num_unique elements of unique_keys and counts are valid.
struct Padded {
  Tensor unique_keys;
  Tensor inverse;
  Tensor counts;
};

// Finds distinct keys. Writes their number to *num_unique, in memory on the engine's device.
Padded unique_of(const DeviceContext& context, Tensor keys, std::optional<Tensor> num_keys,
                 int64_t* num_unique, const char* op) {
  Arguments given(op);
  given.read("keys", keys, kAnyDtype, 1);
  const int64_t n = keys.numel();
  given.check_count("keys", n);
  keys = packed(keys);
  Tensor unique_keys = new_output(keys, {n});
  Tensor inverse = new_output(keys, {n}, ScalarType::Long);
  Tensor counts = new_output(keys, {n}, ScalarType::Long);
  const DeviceCount count = given.count(n, "num_keys", num_keys);
  given.dispatch_keys(keys, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::unique_workspace_bytes(n), keys);
      cuda::unique(data<Key>(keys), count, process_seed(), mutable_data<Key>(unique_keys),
                   mutable_data<int64_t>(inverse), mutable_data<int64_t>(counts), num_unique,
                   memory.data(), context.stream());
    } else {
      const Workspace memory(cpu::unique_workspace_bytes(n), keys);
      *num_unique = cpu::unique(data<Key>(keys), count.get(), process_seed(),
                                mutable_data<Key>(unique_keys), mutable_data<int64_t>(inverse),
                                mutable_data<int64_t>(counts), memory.data(), torch_parallel_for());
    }
  });
  return {unique_keys, inverse, counts};
}

std::tuple<Tensor, Tensor, Tensor> unique(Tensor keys) {
  const DeviceContext context(keys);
  const Workspace word(sizeof(int64_t), keys);
  auto* where = static_cast<int64_t*>(word.data());
  const Padded padded = unique_of(context, keys, std::nullopt, where, "unique");
  int64_t num_unique = 0;
  context.read(where, 1, &num_unique);
  return {trimmed(padded.unique_keys, num_unique), padded.inverse,
          trimmed(padded.counts, num_unique)};
}

// Like unique(), but for a caller that continues without waiting for the device.
std::tuple<Tensor, Tensor, Tensor, Tensor> unique_padded(Tensor keys,
                                                         std::optional<Tensor> num_keys) {
  Tensor num_unique = new_output(keys, {1}, ScalarType::Long);
  const Padded padded = unique_of(DeviceContext(keys), keys, num_keys,
                                  mutable_data<int64_t>(num_unique), "unique_padded");
  return {padded.unique_keys, padded.inverse, padded.counts, num_unique};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("unique", TORCH_BOX(&sparsekit::ops::unique));
  m.impl("unique_padded", TORCH_BOX(&sparsekit::ops::unique_padded));
}
