#include "sparsekit/unique.h"

#include <limits>

#include "common.h"

namespace sparsekit::ops {
namespace {

// The first `count` elements of a buffer: a view when most of it is used, else a copy, so that no
// result keeps much more memory than it shows.
Tensor trimmed(Tensor buffer, int64_t count) {
  const int64_t size = buffer.size(0);
  Tensor view = torch::stable::narrow(buffer, 0, 0, count);
  return 2 * count > size ? view : torch::stable::clone(view);
}

std::tuple<Tensor, Tensor, Tensor> unique(Tensor keys) {
  const char* op = "unique";
  check_dim(keys, 1, op, "keys");
  const int64_t n = keys.numel();
  check(n <= std::numeric_limits<int32_t>::max(), op, ": keys has ", n,
        " elements; at most 2^31 - 1 are supported");
  keys = torch::stable::contiguous(keys);
  Tensor unique_keys = torch::stable::new_empty(keys, {n});
  Tensor inverse = torch::stable::new_empty(keys, {n}, ScalarType::Long);
  Tensor counts = torch::stable::new_empty(keys, {n}, ScalarType::Long);
  Tensor memory = workspace(cpu::unique_workspace_bytes(n), keys);
  const int64_t num_unique = dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    return cpu::unique(data<Key>(keys), n, mutable_data<Key>(unique_keys),
                       mutable_data<int64_t>(inverse), mutable_data<int64_t>(counts),
                       memory.mutable_data_ptr(), torch_parallel_for());
  });
  return {trimmed(unique_keys, num_unique), inverse, trimmed(counts, num_unique)};
}

}  // namespace
}  // namespace sparsekit::ops

STABLE_TORCH_LIBRARY_IMPL(sparsekit, CPU, m) {
  m.impl("unique", TORCH_BOX(&sparsekit::ops::unique));
}
