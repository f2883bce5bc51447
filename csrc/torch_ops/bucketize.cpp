#include "sparsekit/bucketize.h"

#include "engine.h"

namespace sparsekit::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> bucketize(Tensor keys, int64_t world_size,
                                             std::optional<Tensor> num_keys) {
  const char* op = "bucketize";
  check_same_device(op, {{"keys", keys}, {"num_keys", num_keys.value_or(keys)}});
  check_dim(keys, 1, op, "keys");
  check(world_size >= 1 && world_size <= kMaxWorldSize, op, ": world_size must be in [1, ",
        kMaxWorldSize, "], got ", world_size);
  const int64_t n = keys.numel();
  check(!kOnDevice || n <= std::numeric_limits<int32_t>::max(), op, ": keys has ", n,
        " elements; at most 2^31 - 1 are supported");
  keys = packed(keys);
  Tensor by_owner = new_output(keys, {n});
  Tensor counts = new_output(keys, {world_size}, ScalarType::Long);
  Tensor permutation = new_output(keys, {n}, ScalarType::Long);
  const DeviceCount count = device_count(n, num_keys, op, "num_keys");
  const Engine engine(keys);
  dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::bucketize_workspace_bytes(n, world_size), keys);
      cuda::bucketize(data<Key>(keys), count, world_size, mutable_data<Key>(by_owner),
                      mutable_data<int64_t>(counts), mutable_data<int64_t>(permutation),
                      memory.data(), engine.stream());
    } else {
      const Workspace memory(cpu::bucketize_workspace_bytes(n, world_size), keys);
      cpu::bucketize(data<Key>(keys), count.get(), world_size, mutable_data<Key>(by_owner),
                     mutable_data<int64_t>(counts), mutable_data<int64_t>(permutation),
                     memory.data(), torch_parallel_for());
    }
  });
  return {by_owner, counts, permutation};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("bucketize", TORCH_BOX(&sparsekit::ops::bucketize));
}
