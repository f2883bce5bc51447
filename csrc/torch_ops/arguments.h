// Checks the arguments of an op. Refuses outputs that share memory with another argument: a write
// could change a size, a key or a row index that a kernel has already checked and still relies on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "device_context.h"

namespace sparsekit::ops {

using Tensors = std::vector<Tensor>;

// The range of bytes from a tensor's first element to its last element. For a matrix or a vector,
// also the layout of its rows within this range.
struct Span {
  uintptr_t begin = 0, end = 0;
  int64_t row_bytes = 0;
  int64_t stride_bytes = 0;  // distance between rows; 0 unless the tensor has rows with gaps

  Span() = default;

  explicit Span(const Tensor& tensor) {
    const int64_t count = tensor.numel();
    if (count == 0) return;
    const auto element = static_cast<int64_t>(tensor.element_size());
    begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    row_bytes = count * element;
    if (tensor.is_contiguous()) {
      end = begin + static_cast<uintptr_t>(row_bytes);
      return;
    }
    row_bytes = element;
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      row_bytes += (tensor.size(d) - 1) * tensor.stride(d) * element;
    }
    end = begin + static_cast<uintptr_t>(row_bytes);
    const int64_t width = tensor.dim() == 2 ? tensor.size(1) : 1;
    if (tensor.dim() <= 2 && tensor.size(0) > 1 && (width == 1 || tensor.stride(1) == 1)) {
      row_bytes = width * element;
      stride_bytes = tensor.stride(0) * element;
    }
  }

  bool overlaps(const Span& other) const {
    if (begin >= other.end || other.begin >= end) return false;
    if (stride_bytes <= 0 || stride_bytes != other.stride_bytes) return true;
    // Here the rows of both matrices are the same distance apart, as may be the case for the states
    // of an optimizer. If the rows of one matrix lie in the gaps between the rows of the other,
    // they share no element.
    const Span& first = begin <= other.begin ? *this : other;
    const Span& second = begin <= other.begin ? other : *this;
    const auto apart = static_cast<int64_t>(second.begin - first.begin) % stride_bytes;
    return apart < first.row_bytes || apart + second.row_bytes > stride_bytes;
  }
};

// Cached facts about a tensor, for an op that needs each fact more than once: every query is a call
// into torch. Valid as long as the tensor exists.
class View {
 public:
  // `is_kept` is true for a tensor of a KeptList.
  explicit View(const Tensor& tensor, bool is_kept = false)
      : tensor_(&tensor),
        data_(tensor.mutable_data_ptr()),
        span_(tensor),
        numel_(tensor.numel()),
        dim_(tensor.dim()),
        dtype_(dtype_of(tensor)),
        is_cpu_(tensor.is_cpu()),
        is_contiguous_(tensor.is_contiguous()),
        is_kept_(is_kept),
        device_(tensor.device()) {
    for (int64_t d = 0; d < std::min(dim_, kDims); ++d) {
      sizes_[d] = tensor.size(d);
      strides_[d] = tensor.stride(d);
    }
  }

  const Tensor& tensor() const { return *tensor_; }
  const void* const_data_ptr() const { return data_; }
  void* mutable_data_ptr() const { return data_; }
  const Span& span() const { return span_; }
  int64_t numel() const { return numel_; }
  int64_t dim() const { return dim_; }
  // Only for tensors with up to two dimensions.
  int64_t size(int64_t d) const { return sizes_[d]; }
  int64_t stride(int64_t d) const { return strides_[d]; }
  ScalarType scalar_type() const { return dtype_; }
  bool is_cpu() const { return is_cpu_; }
  bool is_contiguous() const { return is_contiguous_; }
  bool is_kept() const { return is_kept_; }
  torch::stable::Device device() const { return device_; }

 private:
  static constexpr int64_t kDims = 2;

  const Tensor* tensor_;
  void* data_;
  Span span_;
  int64_t sizes_[kDims] = {}, strides_[kDims] = {};
  int64_t numel_, dim_;
  ScalarType dtype_;
  bool is_cpu_, is_contiguous_, is_kept_;
  torch::stable::Device device_;
};

// Overloads that let templates take both a Tensor and a View.
inline const Tensor& tensor_of(const Tensor& tensor) {
  return tensor;
}
inline const Tensor& tensor_of(const View& view) {
  return view.tensor();
}
inline Span span_of(const Tensor& tensor) {
  return Span(tensor);
}
inline const Span& span_of(const View& view) {
  return view.span();
}
inline bool is_kept(const Tensor&) {
  return false;
}
inline bool is_kept(const View& view) {
  return view.is_kept();
}
inline ScalarType dtype_of(const View& view) {
  return view.scalar_type();
}
inline const int64_t* int64_data(const View& view) {
  return static_cast<const int64_t*>(view.const_data_ptr());
}

// An argument's name in error messages. The text of a message is composed only when the error is
// raised, since each query of a tensor is a call into torch.
struct Item {
  const char* name;
  int64_t position = -1;  // position in a list, or -1

  Item(const char* name) : name(name) {}
  Item(const char* list, size_t position) : name(list), position(static_cast<int64_t>(position)) {}
};
inline std::ostream& operator<<(std::ostream& text, const Item& item) {
  text << item.name;
  return item.position < 0 ? text : text << '[' << item.position << ']';
}

// Limit on the number of elements of each argument and result. It exceeds what any memory can
// hold, but keeps numbers computed from sizes (in bytes, elements or threads) far from overflow.
constexpr int64_t kMostElements = int64_t{1} << 44;

// Limit on the number of entries, tables or features, because their indices have 32 bits.
constexpr int64_t kMostNumbered = std::numeric_limits<int32_t>::max();

// Pass these for arguments that may have any of several dtypes or numbers of dimensions; the op
// itself then checks them.
constexpr ScalarType kAnyDtype = ScalarType::Undefined;
constexpr int64_t kAnyDim = -1;

// Sets of kept tensors that are known not to overlap, with the memory of each set. They are
// remembered, since checking hundreds of tables takes as long as looking up keys in them.
class KnownApart {
 public:
  struct Range {
    uintptr_t begin, end;
  };
  using Key = std::vector<uint64_t>;  // the op, a set, and how many of its tensors are written to
  using Memory = std::shared_ptr<const std::vector<Range>>;  // in order, without overlaps

  // Returns null if the set is not known.
  static Memory find(const Key& key) {
    KnownApart& known = all();
    const std::lock_guard<std::mutex> lock(known.mutex_);
    for (const auto& [other, memory] : known.sets_) {
      if (other == key) return memory;
    }
    return nullptr;
  }
  static void add(Key key, std::vector<Range> ranges) {
    std::sort(ranges.begin(), ranges.end(),
              [](const Range& one, const Range& other) { return one.begin < other.begin; });
    std::vector<Range> joined;
    for (const Range& range : ranges) {
      if (joined.empty() || joined.back().end <= range.begin) joined.push_back(range);
      joined.back().end = std::max(joined.back().end, range.end);
    }
    KnownApart& known = all();
    const std::lock_guard<std::mutex> lock(known.mutex_);
    if (known.sets_.size() >= kMost) known.sets_.clear();
    known.sets_.emplace_back(std::move(key),
                             std::make_shared<const std::vector<Range>>(std::move(joined)));
  }
  static bool is_within(const Memory& memory, const Span& span) {
    const auto after =
        std::partition_point(memory->begin(), memory->end(),
                             [&](const Range& range) { return range.end <= span.begin; });
    return after != memory->end() && after->begin < span.end;
  }

 private:
  static constexpr size_t kMost = 64;

  static KnownApart& all() {
    static auto* known = new KnownApart;
    return *known;
  }

  std::mutex mutex_;
  std::vector<std::pair<Key, Memory>> sets_;
};

// Checks the arguments of a call. An op that writes to arguments passes kWrites, checks all its
// arguments and then calls check_apart(). For other ops, memory addresses are not recorded.
class Arguments {
 public:
  enum Access { kReads, kWrites };

  explicit Arguments(const char* op, Access access = kReads) : op_(op), access_(access) {}

  const char* op() const { return op_; }

  // Reserves space for this number of arguments.
  void expect(size_t count) { named_.reserve(count); }

  // Throws an error that becomes a ValueError in Python.
  template <class... Parts>
  [[noreturn]] void error(const Parts&... parts) const {
    throw std::invalid_argument(message(where(), parts...));
  }
  template <class... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) error(parts...);
  }
  // Throws an error that becomes an IndexError in Python.
  template <class... Parts>
  [[noreturn]] void index_error(const Parts&... parts) const {
    throw std::out_of_range(message(where(), parts...));
  }

  // Throws an IndexError saying that rows[position] is `row`, beyond the last row of `table`.
  [[noreturn]] void row_error(int64_t position, int64_t row, const char* table,
                              int64_t num_rows) const {
    index_error("rows[", position, "] is ", row, ", but ", table, " has ", num_rows, " rows");
  }

  // Checks an argument that is only read. It must be on the device of the first argument, and must
  // have the given dtype and number of dimensions. It may overlap other arguments that are only
  // read.
  template <class AnyTensor>
  const AnyTensor& read(const Item& name, const AnyTensor& tensor, ScalarType dtype = kAnyDtype,
                        int64_t dim = kAnyDim) {
    return add(name, tensor, dtype, dim, false);
  }
  void read(const Item& name, const std::optional<Tensor>& tensor, ScalarType dtype = kAnyDtype,
            int64_t dim = kAnyDim) {
    if (tensor.has_value()) read(name, *tensor, dtype, dim);
  }
  // Checks an argument that holds a single int64, such as a table's size or hash_seed.
  template <class AnyTensor>
  void read_word(const Item& name, const AnyTensor& word) {
    check_one(name, read(name, word, ScalarType::Long, 1));
  }
  // Checks an argument that the CPU engine reads before it writes to any argument. On the CPU it
  // may overlap any other argument.
  template <class AnyTensor>
  const AnyTensor& read_ahead(const Item& name, const AnyTensor& tensor,
                              ScalarType dtype = kAnyDtype, int64_t dim = kAnyDim) {
    return kOnDevice ? read(name, tensor, dtype, dim) : checked(name, tensor, dtype, dim);
  }
  // Checks an argument that is written to in place. It must be contiguous.
  template <class AnyTensor>
  const AnyTensor& written(const Item& name, const AnyTensor& tensor, ScalarType dtype = kAnyDtype,
                           int64_t dim = kAnyDim) {
    check_contiguous(name, add(name, tensor, dtype, dim, true));
    return tensor;
  }
  // Like written(), but for a matrix that may have gaps between its rows; see row_stride().
  template <class AnyTensor>
  const AnyTensor& written_rows(const Item& name, const AnyTensor& tensor,
                                ScalarType dtype = kAnyDtype, int64_t dim = kAnyDim) {
    return add(name, tensor, dtype, dim, true);
  }
  // Returns the distance, in elements, between the starts of consecutive rows of a matrix or
  // vector. Each row must be contiguous, and rows must not overlap.
  template <class AnyTensor>
  int64_t row_stride(const Item& name, const AnyTensor& tensor) const {
    const int64_t width = tensor.dim() > 1 ? tensor.size(1) : 1;
    check(width <= 1 || tensor.stride(1) == 1, "rows of ", name, " must be contiguous");
    if (tensor.size(0) <= 1) return width;
    check(tensor.stride(0) >= width, "rows of ", name, " must not overlap");
    return tensor.stride(0);
  }

  // Checks each tensor of a list.
  template <class List>
  void read_each(const char* list, const List& tensors, ScalarType dtype = kAnyDtype,
                 int64_t dim = kAnyDim) {
    for (size_t i = 0; i < tensors.size(); ++i) read({list, i}, tensors[i], dtype, dim);
  }
  template <class List>
  void read_each_ahead(const char* list, const List& tensors, ScalarType dtype = kAnyDtype) {
    for (size_t i = 0; i < tensors.size(); ++i) read_ahead({list, i}, tensors[i], dtype);
  }

  // Calls body(table) for each table. If there are several tables, adds the table's index to errors
  // thrown by `body` and to later errors about the arguments that `body` checks.
  template <class Body>
  void for_each_table(size_t count, const Body& body) {
    for (size_t t = 0; t < count; ++t) {
      of_table(t, count);
      body(t);
    }
    table_ = -1;
  }
  void of_table(size_t table, size_t count) {
    if (count > 1) table_ = static_cast<int64_t>(table);
  }

  // Returns the argument that determines the device, or `other` if there is no argument yet.
  const Tensor& first_or(const Tensor& other) const { return first_ == nullptr ? other : *first_; }

  // Throws an error if an argument that is written to overlaps another argument. `kept` has the ids
  // (Views::id()) of all argument lists that may be kept; without it, each call compares all
  // arguments.
  void check_apart(const std::vector<uint64_t>& kept = {}) const {
    if (named_.size() > kFew) {
      if (known_apart(kept)) return;
      if (!any_overlap()) {
        remember_apart(kept);
        return;
      }
    }
    for (size_t i = 1; i < named_.size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (!clash(named_[i], named_[j])) continue;
        error(named_[i], " overlaps ", named_[j],
              " in memory, but what is written to must not be part of another argument");
      }
    }
  }

  template <class AnyTensor>
  void check_dtype(const Item& name, const AnyTensor& tensor, ScalarType dtype) const {
    const ScalarType has = dtype_of(tensor);
    if (has == dtype) return;
    error(name, " must have dtype ", torch::headeronly::toString(dtype), ", got ",
          torch::headeronly::toString(has));
  }

  // Checks that a tensor is int64 or int32. Returns true if it is int64.
  bool check_wide(const Item& name, const Tensor& tensor) const {
    const ScalarType has = dtype_of(tensor);
    check(has == ScalarType::Long || has == ScalarType::Int, name, " must be int64 or int32, got ",
          torch::headeronly::toString(has));
    return has == ScalarType::Long;
  }

  // Checks that the product of sizes is at most kMostElements. A size of 0 counts as 1: a tensor
  // without elements takes no memory, but its other sizes may still be huge.
  void check_elements(const Item& name, std::initializer_list<int64_t> sizes) const {
    int64_t elements = 1;
    bool possible = true;
    for (const int64_t size : sizes) {
      possible &= !__builtin_mul_overflow(elements, std::max<int64_t>(size, 1), &elements);
    }
    if (possible && elements <= kMostElements) return;
    std::ostringstream shape;
    for (const int64_t size : sizes) shape << (shape.tellp() > 0 ? ", " : "") << size;
    error(name, " of shape [", shape.str(),
          "] cannot be: at most 2^44 elements are "
          "supported, and a size of 0 counts as 1");
  }

  // Checks that a tensor has `dim` dimensions, which is 1 or 2, and returns its sizes. For 1
  // dimension, returns (n, 1).
  template <class AnyTensor>
  std::pair<int64_t, int64_t> check_dim(const Item& name, const AnyTensor& tensor,
                                        int64_t dim) const {
    const int64_t has = tensor.dim();
    check(has == dim, name, " must have ", dim, " dimension(s), got ", has);
    const std::pair sizes(tensor.size(0), dim == 2 ? tensor.size(1) : 1);
    check_elements(name, {sizes.first, sizes.second});
    return sizes;
  }

  template <class AnyTensor>
  void check_size(const Item& name, const AnyTensor& tensor, int64_t dim, int64_t size) const {
    const int64_t has = tensor.size(dim);
    check(has == size, name, " must have size ", size, " in dimension ", dim, ", got ", has);
  }

  template <class AnyTensor>
  void check_contiguous(const Item& name, const AnyTensor& tensor) const {
    check(tensor.is_contiguous(), name, " must be contiguous");
  }

  void check_count(const Item& name, int64_t n) const {
    check(n <= kMostNumbered, name, " has ", n, " elements; at most 2^31 - 1 are supported");
  }

  // Checks that a grid can handle rows of `dim` elements. A grid has up to 65535 slices of at least
  // 32 elements.
  void check_row_size(const Item& name, int64_t dim) const {
    constexpr int64_t kMost = 65535 * 32;
    check(!kOnDevice || dim <= kMost, "rows of ", name, " may have at most ", kMost,
          " elements on a device, got ", dim);
  }

  // Checks the numbers of entries and targets of an op that sorts. On a device, sort keys have 32
  // bits. On the CPU, the limit exceeds what any memory can hold, and keeps workspace sizes far
  // from overflow.
  void check_sort_sizes(int64_t entries, const Item& name, int64_t targets) const {
    constexpr int64_t kEnd = kOnDevice ? (int64_t{1} << 32) - 1 : int64_t{1} << 48;
    check(targets >= 0 && targets < kEnd, name, " must be in [0, ", kOnDevice ? "2^32 - 1" : "2^48",
          "), got ", targets);
    check(!kOnDevice || entries <= kMostNumbered, entries,
          " entries; at most 2^31 - 1 are supported");
  }

  void check_list(const Item& name, size_t size, size_t expected) const {
    check(size == expected, name, " must have ", expected, " element(s), got ", size);
  }

  template <class AnyTensor>
  void check_one(const Item& name, const AnyTensor& tensor) const {
    const int64_t has = tensor.numel();
    check(has == 1, name, " must have one element, got ", has);
  }

  // Converts row indices, segment ids or offsets, int32 or int64, to a contiguous int64 tensor.
  Tensor packed_int64(const Item& name, const Tensor& tensor) const {
    if (check_wide(name, tensor)) return packed(tensor);
    // Pack before the conversion: an expanded view can have more elements than fit in memory as
    // int64.
    return torch::stable::to(packed(tensor), ScalarType::Long);
  }

  // Returns the number of elements to use. It is n or, if `exact` is given, the smaller of n and
  // the value in `exact`.
  DeviceCount count(int64_t n, const Item& name, const std::optional<Tensor>& exact) {
    if (!exact.has_value()) return DeviceCount{n};
    check_one(name, read(name, *exact, ScalarType::Long));
    return DeviceCount{n, int64_data(*exact)};
  }

  // Calls body(TypeTag<T>), where T is core's element type for the dtype of `rows`.
  template <class AnyTensor, class Body>
  auto dispatch_rows(const Item& name, const AnyTensor& rows, Body&& body) const {
    switch (dtype_of(rows)) {
      case ScalarType::Float:
        return body(TypeTag<float>{});
      case ScalarType::Double:
        return body(TypeTag<double>{});
      case ScalarType::BFloat16:
        return body(TypeTag<BFloat16>{});
      default:
        error(name, " must be float32, float64 or bfloat16, got ",
              torch::headeronly::toString(rows.scalar_type()));
    }
  }

  // Calls body(TypeTag<Key>), where Key is int32_t or int64_t, the type of the keys.
  template <class Body>
  auto dispatch_keys(const Tensor& keys, Body&& body) const {
    return check_wide("keys", keys) ? body(TypeTag<int64_t>{}) : body(TypeTag<int32_t>{});
  }

 private:
  struct Argument {
    Item name;
    int64_t table;  // index of the argument's table; -1 if there is only one table
    Span span;
    bool is_written, is_kept;

    friend std::ostream& operator<<(std::ostream& text, const Argument& argument) {
      text << argument.name;
      return argument.table < 0 ? text : text << " of table " << argument.table;
    }
  };

  template <class AnyTensor>
  const AnyTensor& add(const Item& name, const AnyTensor& tensor, ScalarType dtype, int64_t dim,
                       bool is_written) {
    checked(name, tensor, dtype, dim);
    if (access_ == kWrites)
      named_.push_back({name, table_, span_of(tensor), is_written, is_kept(tensor)});
    return tensor;
  }

  template <class AnyTensor>
  const AnyTensor& checked(const Item& name, const AnyTensor& tensor, ScalarType dtype,
                           int64_t dim) {
    if (first_ == nullptr) {
      first_ = &tensor_of(tensor);
      first_name_ = name;
      on_cpu_ = tensor.is_cpu();
    } else {
      // Compare is_cpu() first: this is faster than making two device objects.
      check(on_cpu_ ? tensor.is_cpu() : tensor.device() == first_->device(), name,
            " is not on the device of ", first_name_);
    }
    if (dtype != kAnyDtype) check_dtype(name, tensor, dtype);
    if (dim != kAnyDim) check_dim(name, tensor, dim);
    return tensor;
  }

  std::string where() const {
    return table_ < 0 ? message(op_, ": ") : message(op_, ": table ", table_, ": ");
  }

  static bool clash(const Argument& one, const Argument& other) {
    return (one.is_written || other.is_written) && one.span.overlaps(other.span);
  }

  // Returns true if an earlier call found no overlap among the arguments in kept lists, and the
  // other arguments overlap neither the kept ones nor one another.
  bool known_apart(const std::vector<uint64_t>& kept) const {
    if (kept.empty()) return false;
    const KnownApart::Memory memory = KnownApart::find(key_of(kept));
    if (memory == nullptr) return false;
    std::vector<const Argument*> others;
    for (const Argument& argument : named_) {
      if (argument.is_kept) continue;
      if (others.size() == kFew || KnownApart::is_within(memory, argument.span)) return false;
      for (const Argument* other : others) {
        if (clash(argument, *other)) return false;
      }
      others.push_back(&argument);
    }
    return true;
  }
  void remember_apart(const std::vector<uint64_t>& kept) const {
    std::vector<KnownApart::Range> ranges;
    for (const Argument& argument : named_) {
      const auto& [begin, end, row_bytes, stride_bytes] = argument.span;
      if (argument.is_kept && begin < end) ranges.push_back({begin, end});
    }
    if (!kept.empty() && !ranges.empty()) KnownApart::add(key_of(kept), std::move(ranges));
  }
  KnownApart::Key key_of(const std::vector<uint64_t>& kept) const {
    KnownApart::Key key{reinterpret_cast<uintptr_t>(op_)};
    key.insert(key.end(), kept.begin(), kept.end());
    const auto written = [](const Argument& argument) {
      return argument.is_kept && argument.is_written;
    };
    key.push_back(static_cast<uint64_t>(std::count_if(named_.begin(), named_.end(), written)));
    return key;
  }

  // Returns true if any argument that is written to overlaps another argument. Visits the arguments
  // in order of their start addresses, and compares each with the earlier ones that extend beyond
  // its start.
  bool any_overlap() const {
    struct Begin {
      uintptr_t address;
      size_t argument;
    };
    std::vector<Begin> begins;
    begins.reserve(named_.size());
    for (size_t i = 0; i < named_.size(); ++i) begins.push_back({named_[i].span.begin, i});
    std::sort(begins.begin(), begins.end(),
              [](const Begin& one, const Begin& other) { return one.address < other.address; });
    std::vector<const Argument*> writes, reads;
    const auto clashes = [](std::vector<const Argument*>& earlier, const Argument& argument) {
      const auto ended = [&](const Argument* other) {
        return other->span.end <= argument.span.begin;
      };
      earlier.erase(std::remove_if(earlier.begin(), earlier.end(), ended), earlier.end());
      return std::any_of(earlier.begin(), earlier.end(),
                         [&](const Argument* other) { return clash(argument, *other); });
    };
    for (const Begin& begin : begins) {
      const Argument& argument = named_[begin.argument];
      if (clashes(writes, argument)) return true;
      if (argument.is_written && clashes(reads, argument)) return true;
      (argument.is_written ? writes : reads).push_back(&argument);
    }
    return false;
  }

  static constexpr size_t kFew = 16;

  const char* op_;
  Access access_;
  int64_t table_ = -1;
  const Tensor* first_ = nullptr;
  Item first_name_ = "";
  bool on_cpu_ = false;
  std::vector<Argument> named_;
};

}  // namespace sparsekit::ops
