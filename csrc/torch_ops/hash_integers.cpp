#include "sparsekit/hash_integers.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

Tensor hash_integers(Tensor values, bool is_unsigned, int64_t seed) {
  values = packed(Arguments("hash_integers").read("values", values, ScalarType::Long, 1));
  const int64_t n = values.numel();
  Tensor codes = new_output(values, {n});
  const DeviceContext context(values);
  const auto bits = static_cast<uint64_t>(seed);
  if constexpr (kOnDevice) {
    cuda::hash_integers(int64_data(values), n, is_unsigned, bits, mutable_data<int64_t>(codes),
                        context.stream());
  } else {
    cpu::hash_integers(int64_data(values), n, is_unsigned, bits, mutable_data<int64_t>(codes),
                       torch_parallel_for());
  }
  return codes;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("hash_integers", TORCH_BOX(&sparsekit::ops::hash_integers));
}
