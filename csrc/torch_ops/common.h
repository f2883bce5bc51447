// Shared by every op between torch and core: checks with the op's and argument's name, dtype
// dispatch, torch's thread pool. Only torch's stable ABI, never ATen or c10.
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

namespace sparsekit::ops {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

template <class... Parts>
std::string message(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// Python sees a ValueError ...
template <class... Parts>
void check(bool condition, const Parts&... parts) {
  if (!condition) throw std::invalid_argument(message(parts...));
}

// ... or an IndexError.
template <class... Parts>
[[noreturn]] void index_error(const Parts&... parts) {
  throw std::out_of_range(message(parts...));
}

inline ParallelFor torch_parallel_for() {
  return ParallelFor(
      [](int64_t begin, int64_t end, int64_t grain, ParallelFor::Body body, void* context) {
        torch::stable::parallel_for(begin, end, grain,
                                    [=](int64_t b, int64_t e) { body(b, e, context); });
      },
      static_cast<int>(torch::stable::get_num_threads()));
}

// An element of a list of tensors, as errors call it.
struct Item {
  const char* list;
  size_t position;
};
inline std::ostream& operator<<(std::ostream& text, const Item& item) {
  return text << item.list << '[' << item.position << ']';
}

// As scalar_type(), which asks torch for the code of one dtype after another.
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

// Asking whether both are on the CPU is quicker than making two devices.
inline bool same_device(const Tensor& one, const Tensor& other) {
  return one.is_cpu() ? other.is_cpu() : one.device() == other.device();
}

// `name` is text, or an Item, which becomes text only in an error. What an error would say is not
// asked for before there is one: each question to a tensor is a call of torch.
template <class Name>
void check_dtype(const Tensor& tensor, ScalarType dtype, const char* op, const Name& name) {
  const ScalarType has = dtype_of(tensor);
  if (has == dtype) return;
  check(false, op, ": ", name, " must have dtype ", torch::headeronly::toString(dtype), ", got ",
        torch::headeronly::toString(has));
}

// More than any memory has. Checked of every argument and result, so that what is computed from
// sizes (numbers of bytes, of elements, of threads) is far from overflow.
constexpr int64_t kMostElements = int64_t{1} << 44;

// Counts a size of 0 as 1: a tensor without elements takes no memory, and its other sizes may be
// anything.
template <class Name>
void check_elements(std::initializer_list<int64_t> sizes, const char* op, const Name& name) {
  int64_t elements = 1;
  bool possible = true;
  for (const int64_t size : sizes) {
    possible &= !__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements);
  }
  if (possible && elements <= kMostElements) return;
  std::ostringstream shape;
  for (const int64_t size : sizes) shape << (shape.tellp() > 0 ? ", " : "") << size;
  check(false, op, ": ", name, " of shape [", shape.str(),
        "] cannot be: at most 2^44 elements are "
        "supported, and a size of 0 counts as 1");
}

// One dimension or two.
template <class Name>
void check_dim(const Tensor& tensor, int64_t dim, const char* op, const Name& name) {
  const int64_t has = tensor.dim();
  check(has == dim, op, ": ", name, " must have ", dim, " dimension(s), got ", has);
  check_elements({tensor.size(0), dim == 2 ? tensor.size(1) : 1}, op, name);
}

template <class Name>
void check_size(const Tensor& tensor, int64_t dim, int64_t size, const char* op, const Name& name) {
  const int64_t has = tensor.size(dim);
  check(has == size, op, ": ", name, " must have size ", size, " in dimension ", dim, ", got ",
        has);
}

// A tensor that the op writes to: its memory is used as it lies.
template <class Name>
void check_mutable(const Tensor& tensor, const char* op, const Name& name) {
  check(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
}

inline const int64_t* int64_data(const Tensor& tensor) {
  return tensor.const_data_ptr<int64_t>();
}

// The tensor itself if it is contiguous: asking torch for that goes through its dispatcher.
inline Tensor packed(const Tensor& tensor) {
  if (tensor.is_contiguous()) return tensor;
  try {
    return torch::stable::contiguous(tensor);
  } catch (const std::exception&) {  // whose text is of the ABI, and the reason only on stderr
    throw std::runtime_error(message("sparsekit: torch has no ",
                                     tensor.numel() * static_cast<int64_t>(tensor.element_size()),
                                     " bytes for a contiguous copy; out of memory?"));
  }
}

// Row numbers, segment ids or offsets, contiguous and in int64; they may come in int32.
inline Tensor packed_int64(const Tensor& tensor, const char* op, const char* name) {
  const ScalarType dtype = dtype_of(tensor);
  // Packed first: a view of few elements in memory can have more than memory has room for.
  if (dtype == ScalarType::Int) return torch::stable::to(packed(tensor), ScalarType::Long);
  check(dtype == ScalarType::Long, op, ": ", name, " must be int64 or int32, got ",
        torch::headeronly::toString(dtype));
  return packed(tensor);
}

// A tensor to be filled, of the dtype of `like` unless another is named, and on its device. On the
// CPU its memory is kept for others afterwards if it is as large as kept_bytes.
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
  // torch names the size that overflows.
  if (!possible) return torch::stable::new_empty(like, sizes, dtype);
  int64_t strides[2] = {1, 1};
  if (sizes.size() == 2) strides[0] = std::max<int64_t>(sizes.begin()[1], 1);
#if defined(SPARSEKIT_ENGINE_CPU)
  void* memory = bytes < kept_bytes ? nullptr : take_large_memory(bytes);
  if (memory != nullptr) {
    return torch::stable::from_blob(memory, sizes, {strides, sizes.size()}, like.device(), type,
                                    &give_back_large_memory);
  }
#endif
  // Not new_empty, which goes through the dispatcher.
  const torch::stable::Device device = like.device();
  const auto device_code =
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(device.type()));
  AtenTensorHandle output;
  if (aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides,
                               type_code, device_code, device.index(), &output) != TORCH_SUCCESS) {
    // The reason does not get through torch's stable ABI, and there is hardly another one.
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

// The ScalarType in which rows of core's type T are accumulated.
template <class T>
constexpr ScalarType kAccumulateType =
    std::is_same_v<Acc<T>, double> ? ScalarType::Double : ScalarType::Float;

// Calls body(TypeTag<T>) with core's type of the rows' dtype.
template <class Body>
auto dispatch_rows(const Tensor& rows, const char* op, const char* name, Body&& body) {
  switch (dtype_of(rows)) {
    case ScalarType::Float:
      return body(TypeTag<float>{});
    case ScalarType::Double:
      return body(TypeTag<double>{});
    case ScalarType::BFloat16:
      return body(TypeTag<BFloat16>{});
    default:
      throw std::invalid_argument(message(op, ": ", name,
                                          " must be float32, float64 or bfloat16, got ",
                                          torch::headeronly::toString(rows.scalar_type())));
  }
}

// Calls body(TypeTag<Key>) with int32_t or int64_t.
template <class Body>
auto dispatch_keys(const Tensor& keys, const char* op, Body&& body) {
  switch (dtype_of(keys)) {
    case ScalarType::Int:
      return body(TypeTag<int32_t>{});
    case ScalarType::Long:
      return body(TypeTag<int64_t>{});
    default:
      throw std::invalid_argument(message(op, ": keys must be int64 or int32, got ",
                                          torch::headeronly::toString(keys.scalar_type())));
  }
}

template <class T>
const T* data(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* mutable_data(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

}  // namespace sparsekit::ops
