#include "sparsekit/unique.h"

#include <limits>

#include "engine.h"

namespace sparsekit::ops {
namespace {

// The first `count` elements of a buffer: a view when most of it is used, else a copy, so that no
// result keeps much more memory than it shows. A copy of 512 KiB is worth keeping already: the
// first touch of new memory took several times as long as the copying.
Tensor trimmed(Tensor buffer, int64_t count) {
  const int64_t size = buffer.size(0);
  Tensor view = torch::stable::narrow(buffer, 0, 0, count);
  if (2 * count > size) return view;
  Tensor copy = new_output(buffer, {count}, std::nullopt, kLargeBytes / 4);
  return torch::stable::copy_(copy, view);
}

// A result as long as the input, with the number of distinct keys where the engine left it.
struct Padded {
  Tensor unique_keys;
  Tensor inverse;
  Tensor counts;
  Tensor num_unique;
};

Padded unique_of(const Engine& engine, Tensor keys, std::optional<Tensor> num_keys,
                 const char* op) {
  check_dim(keys, 1, op, "keys");
  const int64_t n = keys.numel();
  check(n <= std::numeric_limits<int32_t>::max(), op, ": keys has ", n,
        " elements; at most 2^31 - 1 are supported");
  keys = packed(keys);
  Tensor unique_keys = new_output(keys, {n});
  Tensor inverse = new_output(keys, {n}, ScalarType::Long);
  Tensor counts = new_output(keys, {n}, ScalarType::Long);
  Tensor num_unique = new_output(keys, {1}, ScalarType::Long);
  check_same_device(op, {{"keys", keys}, {"num_keys", num_keys.value_or(keys)}});
  const DeviceCount count = device_count(n, num_keys, op, "num_keys");
  dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      Tensor memory = workspace(cuda::unique_workspace_bytes(n), keys);
      cuda::unique(data<Key>(keys), count, mutable_data<Key>(unique_keys),
                   mutable_data<int64_t>(inverse), mutable_data<int64_t>(counts),
                   mutable_data<int64_t>(num_unique), memory.mutable_data_ptr(), engine.stream());
    } else {
      Tensor memory = workspace(cpu::unique_workspace_bytes(n), keys);
      *mutable_data<int64_t>(num_unique) =
          cpu::unique(data<Key>(keys), count.get(), mutable_data<Key>(unique_keys),
                      mutable_data<int64_t>(inverse), mutable_data<int64_t>(counts),
                      memory.mutable_data_ptr(), torch_parallel_for());
    }
  });
  return {unique_keys, inverse, counts, num_unique};
}

std::tuple<Tensor, Tensor, Tensor> unique(Tensor keys) {
  const Engine engine(keys);
  const Padded padded = unique_of(engine, keys, std::nullopt, "unique");
  int64_t num_unique = 0;
  engine.read(int64_data(padded.num_unique), 1, &num_unique);
  return {trimmed(padded.unique_keys, num_unique), padded.inverse,
          trimmed(padded.counts, num_unique)};
}

// For a caller that goes on without a word from the device.
std::tuple<Tensor, Tensor, Tensor, Tensor> unique_padded(Tensor keys,
                                                         std::optional<Tensor> num_keys) {
  const Padded padded = unique_of(Engine(keys), keys, num_keys, "unique_padded");
  return {padded.unique_keys, padded.inverse, padded.counts, padded.num_unique};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("unique", TORCH_BOX(&sparsekit::ops::unique));
  m.impl("unique_padded", TORCH_BOX(&sparsekit::ops::unique_padded));
}
