// Arguments shared by the forward and backward passes of pooling in many tables.
#pragma once

#include "group.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::ops {

// Describes a tensor as rows of `width` contiguous elements that begin `distance` elements apart.
// The distance is 0 if the tensor is contiguous. The width is 0 if the tensor has no such layout.
struct RowLayout {
  int64_t width, distance;

  static RowLayout of(const Tensor& tensor) {
    int64_t d = tensor.dim() - 1, width = 1;
    for (; d >= 0 && (tensor.size(d) == 1 || tensor.stride(d) == width); --d) {
      width *= tensor.size(d);
    }
    if (d < 0 || tensor.numel() == 0) return {std::max<int64_t>(width, 1), 0};
    const int64_t distance = tensor.stride(d);
    int64_t expected = distance;
    for (; d >= 0; expected *= tensor.size(d--)) {
      if (tensor.size(d) != 1 && tensor.stride(d) != expected) return {0, 0};
    }
    return distance < width ? RowLayout{0, 0} : RowLayout{width, distance};
  }

  // Returns true if each vector with this placement lies within one row and is therefore
  // contiguous.
  bool has(const Placement& placement, int64_t count, int64_t dim) const {
    if (width == 0) return false;
    const bool each = count <= 1 || placement.stride % width == 0 || distance == 0;
    return each && (distance == 0 || placement.begin % width + dim <= width);
  }
  int64_t position(int64_t element) const {
    return distance == 0 ? element : element / width * distance + element % width;
  }
};

// The row and the bag of each entry, as returned by the ops that find rows.
struct GivenEntries {
  const Tensor& index;
  const std::optional<Tensor>& rows;
  const std::optional<Tensor>& counts;
  const Tensor& bags;
  const Tensor& features;
  const Tensors& sample_weights;
  const std::optional<Tensor>& key_starts;
};

// Checked arguments shared by forward and backward. Owns the memory that features point to.
class GroupArguments {
 public:
  GroupFeatures group;
  Tensor index, bags;
  std::optional<Tensor> rows, counts, key_starts;
  Tensors sample_weights, keys;
  int64_t entries = 0;

  GroupArguments(Arguments& given, const GivenEntries& of, const Tensors& keys_in,
                 size_t num_tables)
      : group(given, of.features, num_tables), entries(of.index.numel()), given_(given) {
    given.check_count("index", entries);
    given.check(group.num_bags <= kMostNumbered, "features have ", group.num_bags,
                " bags; at most 2^31 - 1 are supported");
    index = numbers(given, "index", of.index, ScalarType::Int, entries);
    const int64_t num_bounds = of.bags.numel();
    given.check(num_bounds > group.num_bags, "bags has ", num_bounds,
                " elements, but features have ", group.num_bags, " bags");
    bags = numbers(given, "bags", of.bags, ScalarType::Int, num_bounds);
    if (of.rows.has_value()) {
      rows = numbers(given, "rows", *of.rows, ScalarType::Int, entries);
      rows_data_ = data<int32_t>(*rows);
    }
    if (of.counts.has_value()) {
      counts =
          numbers(given, "counts", *of.counts, ScalarType::Long, static_cast<int64_t>(num_tables));
      counts_data_ = int64_data(*counts);
    }
    given.check(!rows.has_value() || counts.has_value(), "rows need counts");
    if (of.key_starts.has_value()) {
      key_starts = numbers(given, "key_starts", *of.key_starts, ScalarType::Long,
                           static_cast<int64_t>(group.features.size()));
    }
    add_of_sources(given, "sample_weights", of.sample_weights, sample_weights);
    add_of_sources(given, "keys", keys_in, keys);
    const bool by_source = !sample_weights.empty() || !keys.empty();
    given.check(!by_source || key_starts.has_value(), "sample_weights and keys need key_starts");
    if constexpr (!kOnDevice) {
      check_bags();
      check_counts();
    }
  }

  // Checks that the vectors of all bags lie within their tensors and do not overlap. `dims` holds
  // the dim of each table.
  void check_placements(const Tensors& vectors, const char* name,
                        const std::vector<int64_t>& dims) const {
    std::vector<int64_t> sizes;
    sizes.reserve(vectors.size());
    for (const Tensor& tensor : vectors) sizes.push_back(tensor.numel());
    for (size_t f = 0; f < group.features.size(); ++f) {
      const Placement& placement = group.placements[f];
      const int64_t count = group.features[f].bags, dim = dims[group.features[f].table];
      given_.check(placement.tensor >= 0 && placement.tensor < static_cast<int64_t>(vectors.size()),
                   "features[", f, "] has its vectors in ", name, "[", placement.tensor, "] of ",
                   vectors.size());
      if (count == 0 || dim == 0) continue;
      const int64_t elements = sizes[placement.tensor];
      const bool begins = placement.begin >= 0 && placement.begin <= elements;
      const int64_t rest = begins ? elements - placement.begin - dim : -1;
      const bool within = rest >= 0;
      const bool apart =
          count == 1 || (within && placement.stride >= dim && count - 1 <= rest / placement.stride);
      given_.check(within && apart, "features[", f, "] has ", count, " vectors of ", dim,
                   " elements from ", placement.begin, " on, with a stride of ", placement.stride,
                   ", which ", name, "[", placement.tensor, "] with ", elements,
                   " elements has no room for, or which overlap");
    }
  }

  // Returns the tensors. A tensor whose vectors cannot be read in place is replaced by a copy.
  Tensors readable(Tensors tensors, const std::vector<int64_t>& dims) const {
    const auto contiguous = [](const Tensor& tensor) { return tensor.is_contiguous(); };
    if (std::all_of(tensors.begin(), tensors.end(), contiguous)) return tensors;
    for (size_t f = 0; f < group.features.size(); ++f) {
      Tensor& tensor = tensors[group.placements[f].tensor];
      if (tensor.is_contiguous()) continue;
      const Feature& feature = group.features[f];
      const RowLayout layout = RowLayout::of(tensor);
      if (!layout.has(group.placements[f], feature.bags, dims[feature.table])) {
        tensor = packed(tensor);
      }
    }
    return tensors;
  }

  template <class T>
  std::vector<FeatureBags<T>> bags_of(const Tensors& vectors, bool written) const {
    std::vector<FeatureBags<T>> features;
    features.reserve(group.features.size());
    const int32_t* bounds = data<int32_t>(bags);
    std::vector<T*> addresses;
    std::vector<RowLayout> layouts;
    addresses.reserve(vectors.size());
    layouts.reserve(vectors.size());
    for (const Tensor& tensor : vectors) {
      addresses.push_back(written ? mutable_data<T>(tensor) : const_cast<T*>(data<T>(tensor)));
      layouts.push_back(written ? RowLayout{} : RowLayout::of(tensor));
    }
    for (size_t f = 0; f < group.features.size(); ++f) {
      const Feature& feature = group.features[f];
      const Placement& placement = group.placements[f];
      T* const address = addresses[placement.tensor];
      FeatureBags<T> of{};
      of.table = feature.table;
      of.num_bags = feature.bags;
      of.bags = {nullptr, bounds};
      of.combiner = placement.combiner;
      of.stride = placement.stride;
      of.max_nnz = feature.max_nnz;
      if (written) {
        of.out = address + placement.begin;
      } else {
        const RowLayout& layout = layouts[placement.tensor];
        of.grad = address + layout.position(placement.begin);
        of.stride = layout.position(placement.stride);
      }
      add_source(static_cast<int64_t>(f), of);
      features.push_back(of);
      bounds += feature.bags;
    }
    return features;
  }

  const int32_t* rows_data() const { return rows_data_; }
  int64_t count_of(size_t t) const { return counts_data_ != nullptr ? counts_data_[t] : 0; }

  // With checks on, throws the error that the device found in `index` or `rows`, if any.
  void check_found(const DeviceContext& context) const {
    const int64_t bad_index = context.error_position(DeviceError::kGroupIndex, entries);
    const int64_t bad_row = context.error_position(DeviceError::kBagRow, entries);
    context.error_position(DeviceError::kBagOffset, entries + bags.numel());
    if (bad_index >= 0) given_.index_error("index[", bad_index, "] is no number of its table");
    if (bad_row >= 0) given_.index_error("an entry has a row that its table does not have");
  }

  // Throws an error for a number that is not in [0, limit).
  [[noreturn]] void bad_number(const char* name, int64_t position, int64_t number, int64_t table,
                               int64_t limit, const char* what) const {
    given_.index_error(name, "[", position, "] is ", number, ", but table ", table, " has ", limit,
                       " ", what);
  }

 private:
  static Tensor numbers(Arguments& given, const char* name, const Tensor& tensor, ScalarType dtype,
                        int64_t size) {
    given.read(name, tensor, dtype, 1);
    given.check_size(name, tensor, 0, size);
    return packed(tensor);
  }

  // Checks the sources' tensors, which have one element per key, and appends them to `list`.
  void add_of_sources(Arguments& given, const char* name, const Tensors& tensors,
                      Tensors& list) const {
    if (tensors.empty()) return;
    for (const Feature& feature : group.features) {
      given.check(feature.source >= 0 && feature.source < static_cast<int64_t>(tensors.size()),
                  name, " has ", tensors.size(), " tensors, but a feature has source ",
                  feature.source);
    }
    given.read_each(name, tensors, kAnyDtype, 1);
    list.reserve(tensors.size());
    for (const Tensor& tensor : tensors) list.push_back(packed(tensor));
  }

  // Sets the weights and keys of a feature to those of its source, if the source has any.
  template <class T>
  void add_source(int64_t f, FeatureBags<T>& of) const {
    if (sample_weights.empty() && keys.empty()) return;
    const int64_t s = group.features[f].source;
    of.key_start = int64_data(*key_starts) + f;
    // Vectors that are copied instead of pooled have no weights.
    if (!sample_weights.empty() && sample_weights[s].numel() > 0 &&
        of.combiner != Combiner::kNone) {
      given_.check_dtype("sample_weights", sample_weights[s], kAccumulateType<T>);
      of.sample_weights = data<Acc<T>>(sample_weights[s]);
      of.num_keys = sample_weights[s].numel();
      check_key_start(f, of, "sample_weights");
    }
    if (keys.empty()) return;
    of.wide_keys = given_.check_wide({"keys", static_cast<size_t>(s)}, keys[s]);
    const int64_t num_keys = keys[s].numel();
    given_.check(of.sample_weights == nullptr || of.num_keys == num_keys, "sample_weights[", s,
                 "] must have one element for each of the ", num_keys, " keys, got ", of.num_keys);
    of.keys = keys[s].const_data_ptr();
    of.num_keys = num_keys;
    check_key_start(f, of, "keys");
  }

  template <class T>
  void check_key_start(int64_t f, const FeatureBags<T>& of, const char* name) const {
    if constexpr (!kOnDevice) {
      const int64_t first = of.first(), n = of.num_entries();
      given_.check(first >= 0 && first <= of.num_keys && n <= of.num_keys - first, "features[", f,
                   "] has keys ", first, " to ", first + n, " of its source, but ", name, "[",
                   group.features[f].source, "] has ", of.num_keys, " elements");
    }
  }

  // On the CPU: checks that the start positions of bags begin at 0, never decrease, and do not
  // exceed the number of entries.
  void check_bags() {
    const int32_t* bounds = data<int32_t>(bags);
    const Source all{nullptr, bounds, false, false, entries, group.num_bags};
    const ParallelFor parallel_for = torch_parallel_for();
    int64_t bag = 0;
    given_.check(bounds[0] == 0, "bags must begin with 0, got ", bounds[0]);
    for (Feature& feature : group.features) {
      const cpu::BagCheck bad =
          cpu::check_bags(all, bag, bag + feature.bags, feature.max_nnz, parallel_for);
      given_.check(bad.what != cpu::BadBag::kOffset,
                   "bags must rise to at most len(index) = ", entries, ", but bags[", bad.position,
                   "] is ", bad.position < 0 ? 0 : bounds[bad.position]);
      given_.check(bad.what != cpu::BadBag::kTooLong, "bag ", bad.position,
                   " has more keys than its max_nnz=", feature.max_nnz);
      feature.first_entry = bounds[bag];
      bag += feature.bags;
      feature.n = bounds[bag] - feature.first_entry;
    }
  }

  void check_counts() const {
    if (!counts.has_value()) return;
    for (size_t t = 0; t < group.num_tables(); ++t) {
      const int64_t most = rows ? entries_of(t).second : kMostElements;
      given_.check(count_of(t) >= 0 && count_of(t) <= most, "counts[", t, "] is ", count_of(t),
                   ", but must be in [0, ", most, "]");
    }
  }

 public:
  // On the CPU: returns the first entry of a table and its number of entries.
  std::pair<int64_t, int64_t> entries_of(size_t t) const {
    const int64_t begin = group.table_features[t], end = group.table_features[t + 1];
    if (begin == end) return {0, 0};
    const Feature &first = group.features[begin], &last = group.features[end - 1];
    return {first.first_entry, last.first_entry + last.n - first.first_entry};
  }
  // On the CPU: returns the index of the table that an entry belongs to.
  int64_t table_of(int64_t entry) const {
    size_t f = 0;
    while (entry >= group.features[f].first_entry + group.features[f].n) ++f;
    return group.features[f].table;
  }

 private:
  const Arguments& given_;
  const int32_t* rows_data_ = nullptr;
  const int64_t* counts_data_ = nullptr;
};

}  // namespace sparsekit::ops
