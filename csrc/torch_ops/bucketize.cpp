#include "sparsekit/bucketize.h"

#include "device_context.h"

namespace sparsekit::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> bucketize(Tensor keys, int64_t world_size,
                                             std::optional<Tensor> map,
                                             std::optional<Tensor> num_keys) {
  const char* op = "bucketize";
  check_same_device(
      op, {{"keys", keys}, {"owners", map.value_or(keys)}, {"num_keys", num_keys.value_or(keys)}});
  check_dim(keys, 1, op, "keys");
  check(world_size >= 1 && world_size <= kMaxWorldSize, op, ": world_size must be in [1, ",
        kMaxWorldSize, "], got ", world_size);
  const int64_t n = keys.numel();
  check(!kOnDevice || n <= std::numeric_limits<int32_t>::max(), op, ": keys has ", n,
        " elements; at most 2^31 - 1 are supported");
  if (map.has_value()) {
    check_dtype(*map, ScalarType::Short, op, "owners");
    check_dim(*map, 1, op, "owners");
    check_size(*map, 0, kVirtualShards, op, "owners");
    map = packed(*map);
  }
  const Owners owners(map.has_value() ? data<int16_t>(*map) : nullptr, world_size);
  keys = packed(keys);
  Tensor by_owner = new_output(keys, {n});
  Tensor counts = new_output(keys, {world_size}, ScalarType::Long);
  Tensor permutation = new_output(keys, {n}, ScalarType::Long);
  const DeviceCount count = device_count(n, num_keys, op, "num_keys");
  const DeviceContext context(keys);
  int64_t bad = -1;
  dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::bucketize_workspace_bytes(n, world_size), keys);
      cuda::bucketize(data<Key>(keys), count, owners, mutable_data<Key>(by_owner),
                      mutable_data<int64_t>(counts), mutable_data<int64_t>(permutation),
                      context.error_word(DeviceError::kOwner), memory.data(), context.stream());
      if (map.has_value()) bad = context.error_position(DeviceError::kOwner, kVirtualShards);
    } else {
      const Workspace memory(cpu::bucketize_workspace_bytes(n, world_size), keys);
      bad = cpu::bucketize(data<Key>(keys), count.get(), owners, mutable_data<Key>(by_owner),
                           mutable_data<int64_t>(counts), mutable_data<int64_t>(permutation),
                           memory.data(), torch_parallel_for());
    }
  });
  check(bad < 0, op, ": owners[", bad, "] is ", bad < 0 ? 0 : context.value(*map, bad),
        ", but must be a rank, in [0, ", world_size, ")");
  return {by_owner, counts, permutation};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("bucketize", TORCH_BOX(&sparsekit::ops::bucketize));
}
