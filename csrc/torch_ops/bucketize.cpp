#include "sparsekit/bucketize.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> bucketize(Tensor keys, int64_t world_size,
                                             std::optional<Tensor> map,
                                             std::optional<Tensor> num_keys) {
  Arguments given("bucketize");
  given.read("keys", keys, kAnyDtype, 1);
  given.read("owners", map, ScalarType::Short, 1);
  given.check(world_size >= 1 && world_size <= kMaxWorldSize, "world_size must be in [1, ",
              kMaxWorldSize, "], got ", world_size);
  const int64_t n = keys.numel();
  if (kOnDevice) given.check_count("keys", n);
  if (map.has_value()) {
    given.check_size("owners", *map, 0, kVirtualShards);
    map = packed(*map);
  }
  const Owners owners(map.has_value() ? data<int16_t>(*map) : nullptr, world_size);
  keys = packed(keys);
  Tensor by_owner = new_output(keys, {n});
  Tensor counts = new_output(keys, {world_size}, ScalarType::Long);
  Tensor permutation = new_output(keys, {n}, ScalarType::Long);
  const DeviceCount count = given.count(n, "num_keys", num_keys);
  const DeviceContext context(keys);
  int64_t bad = -1;
  given.dispatch_keys(keys, [&](auto tag) {
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
  given.check(bad < 0, "owners[", bad, "] is ", bad < 0 ? 0 : context.value(*map, bad),
              ", but must be a rank, in [0, ", world_size, ")");
  return {by_owner, counts, permutation};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("bucketize", TORCH_BOX(&sparsekit::ops::bucketize));
}
