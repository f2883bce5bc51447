// Functions shared by all ops: tensor memory, error messages, and torch's thread pool. This code
// uses only torch's stable ABI, never ATen or c10.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>

#include "large_memory.h"
#include "sparsekit/dtypes.h"
#include "sparsekit/parallel.h"

#if defined(SPARSEKIT_ENGINE_SIMT)
namespace sparsekit::simt::host {
void* address_without_memory(int64_t bytes);  // see simt/host.h
bool only_plans();
}  // namespace sparsekit::simt::host
#endif

namespace sparsekit::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

inline ParallelFor torch_parallel_for() {
  return ParallelFor(
      [](int64_t begin, int64_t end, int64_t grain, ParallelFor::Body body, void* context) {
        torch::stable::parallel_for(begin, end, grain,
                                    [=](int64_t b, int64_t e) { body(b, e, context); });
      },
      static_cast<int>(torch::stable::get_num_threads()));
}

// Like scalar_type(), but faster: scalar_type() compares the dtype with one candidate after
// another, and calls torch each time.
inline ScalarType dtype_of(const Tensor& tensor) {
  static const int32_t codes[] = {aoti_torch_dtype_int64(), aoti_torch_dtype_float32(),
                                  aoti_torch_dtype_int32(), aoti_torch_dtype_bfloat16(),
                                  aoti_torch_dtype_float64()};
  constexpr ScalarType kTypes[] = {ScalarType::Long, ScalarType::Float, ScalarType::Int,
                                   ScalarType::BFloat16, ScalarType::Double};
  int32_t code = -1;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &code));
  const auto* known = std::find(std::begin(codes), std::end(codes), code);
  return known == std::end(codes) ? tensor.scalar_type() : kTypes[known - codes];
}

inline const int64_t* int64_data(const Tensor& tensor) {
  return tensor.const_data_ptr<int64_t>();
}

// Returns the tensor itself if it is contiguous, otherwise a contiguous copy. Does not call torch's
// dispatcher if the tensor is contiguous.
inline Tensor packed(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {  // its message omits the reason, which torch prints itself
    throw std::runtime_error(message("sparsekit: torch has no ",
                                     tensor.numel() * static_cast<int64_t>(tensor.element_size()),
                                     " bytes for a contiguous copy; out of memory?"));
  }
}

// Returns an uninitialised tensor on the device of `like`. It has the dtype of `like` unless
// another dtype is given. On the CPU, when a tensor of at least kept_bytes is freed, its memory is
// not released but kept for later tensors.
inline Tensor new_output(const Tensor& like, std::initializer_list<int64_t> sizes,
                         std::optional<ScalarType> dtype = std::nullopt,
                         [[maybe_unused]] size_t kept_bytes = kLargeBytes) {
  const ScalarType type = dtype.has_value() ? *dtype : dtype_of(like);
  const auto type_code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  size_t bytes = aoti_torch_dtype_element_size(type_code);
  bool possible = true;
  for (const int64_t size : sizes) {
    possible &= !__builtin_mul_overflow(bytes, static_cast<size_t>(size), &bytes);
  }
  // Let torch raise its own error, which names the size that overflows.
  if (!possible) return torch::stable::new_empty(like, sizes, dtype);
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
#if defined(SPARSEKIT_ENGINE_CPU)
  void* memory = bytes < kept_bytes ? nullptr : take_large_memory(bytes);
  if (memory != nullptr) {
    return torch::stable::from_blob(memory, sizes, {strides, sizes.size()}, like.device(), type,
                                    &give_back_large_memory);
  }
#elif defined(SPARSEKIT_ENGINE_SIMT)
  void* memory = simt::host::address_without_memory(static_cast<int64_t>(bytes));
  if (memory != nullptr) {
    return torch::stable::from_blob(memory, sizes, {strides, sizes.size()}, like.device(), type);
  }
#endif
  // Avoid new_empty(), which goes through the dispatcher.
  const torch::stable::Device device = like.device();
  const auto device_code =
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(device.type()));
  AtenTensorHandle output;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                               type_code, device_code, device.index(), &output) != TORCH_SUCCESS) {
    // The stable ABI does not give the reason for the failure, but it is almost always lack of
    // memory.
    throw std::runtime_error(
        message("sparsekit: torch has no ", bytes, " bytes for an output or workspace of ",
                sizes.begin()[0],
                sizes.size() == 2 ? " rows; out of memory?" : " elements; out of memory?"));
  }
  return Tensor(output);
}

template <class T>
struct TypeTag {
  using type = T;
};

// The ScalarType that core uses to accumulate rows of type T.
template <class T>
constexpr ScalarType kAccumulateType =
    std::is_same_v<Acc<T>, double> ? ScalarType::Double : ScalarType::Float;

template <class T, class AnyTensor>
const T* data(const AnyTensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T, class AnyTensor>
T* mutable_data(const AnyTensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace sparsekit::ops
