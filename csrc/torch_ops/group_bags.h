// The arguments that pooling of many tables and its backward have in common.
#pragma once

#include "group.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::ops {

// A tensor as rows of `width` neighbouring elements, `distance` apart, or 0 if it is contiguous. A
// width of 0 says that it is nothing of that kind.
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

  // True if vectors with this placement in a contiguous tensor lie within one row each.
  bool has(const Placement& placement, int64_t count, int64_t dim) const {
    if (width == 0) return false;
    const bool each = count <= 1 || placement.stride % width == 0 || distance == 0;
    return each && (distance == 0 || placement.begin % width + dim <= width);
  }
  int64_t position(int64_t element) const {
    return distance == 0 ? element : element / width * distance + element % width;
  }
};

// Checked arguments that forward and backward share; owns the memory that features point to.
class GroupArguments {
 public:
  GroupFeatures group;
  Tensor index, bags;
  std::optional<Tensor> rows, counts, key_starts;
  std::vector<Tensor> sample_weights, keys;
  int64_t entries = 0;

  GroupArguments(const char* op, const std::vector<Tensor>& vectors, const char* vectors_name,
                 const Tensor& index_in, const std::optional<Tensor>& rows_in,
                 const std::optional<Tensor>& counts_in, const Tensor& bags_in,
                 const Tensor& features, const std::vector<Tensor>& sample_weights_in,
                 const std::optional<Tensor>& key_starts_in, const std::vector<Tensor>& keys_in,
                 int64_t num_tables)
      : group(op, features, num_tables), op_(op) {
    entries = index_in.numel();
    check(entries <= std::numeric_limits<int32_t>::max(), op, ": index has ", entries,
          " elements; at most 2^31 - 1 are supported");
    check_list_device(index_in, vectors, op, vectors_name);
    check_list_device(index_in, sample_weights_in, op, "sample_weights");
    check_list_device(index_in, keys_in, op, "keys");
    index = numbers(index_in, ScalarType::Int, entries, "index");
    check(bags_in.numel() > group.num_bags, op, ": bags has ", bags_in.numel(),
          " elements, but features have ", group.num_bags, " bags");
    bags = numbers(bags_in, ScalarType::Int, bags_in.numel(), "bags");
    if (rows_in.has_value()) rows = numbers(*rows_in, ScalarType::Int, entries, "rows");
    if (counts_in.has_value()) counts = numbers(*counts_in, ScalarType::Long, num_tables, "counts");
    check(!rows.has_value() || counts.has_value(), op, ": rows need counts");
    if (key_starts_in.has_value()) {
      const auto count = static_cast<int64_t>(group.features.size());
      key_starts = numbers(*key_starts_in, ScalarType::Long, count, "key_starts");
    }
    add_of_sources(sample_weights_in, sample_weights, "sample_weights");
    add_of_sources(keys_in, keys, "keys");
    const bool by_source = !sample_weights.empty() || !keys.empty();
    check(!by_source || key_starts.has_value(), op, ": sample_weights and keys need key_starts");
    if constexpr (!kOnDevice) {
      check_bags();
      check_counts();
    }
  }

  // Checks where the vectors of all bags lie, which the dims of their tables decide.
  void check_placements(const std::vector<Tensor>& vectors, const char* name,
                        const std::vector<int64_t>& dims) const {
    for (size_t f = 0; f < group.features.size(); ++f) {
      const Placement& placement = group.placements[f];
      const int64_t count = group.features[f].bags, dim = dims[group.features[f].table];
      check(placement.tensor >= 0 && placement.tensor < static_cast<int64_t>(vectors.size()), op_,
            ": features[", f, "] has its vectors in ", name, "[", placement.tensor, "] of ",
            vectors.size());
      if (count == 0 || dim == 0) continue;
      const int64_t elements = vectors[placement.tensor].numel();
      const bool begins = placement.begin >= 0 && placement.begin <= elements;
      const int64_t rest = begins ? elements - placement.begin - dim : -1;
      const bool within = rest >= 0;
      const bool apart =
          count == 1 || (within && placement.stride >= dim && count - 1 <= rest / placement.stride);
      check(within && apart, op_, ": features[", f, "] has ", count, " vectors of ", dim,
            " elements from ", placement.begin, " on, with a stride of ", placement.stride,
            ", which ", name, "[", placement.tensor, "] with ", elements,
            " elements has no room for, or which overlap");
    }
  }

  // The tensors, copied where vectors cannot be read from where they lie.
  std::vector<Tensor> readable(std::vector<Tensor> tensors,
                               const std::vector<int64_t>& dims) const {
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
  std::vector<FeatureBags<T>> bags_of(const std::vector<Tensor>& vectors, bool written) const {
    std::vector<FeatureBags<T>> features;
    features.reserve(group.features.size());
    const int32_t* bounds = data<int32_t>(bags);
    for (size_t f = 0; f < group.features.size(); ++f) {
      const Feature& feature = group.features[f];
      const Placement& placement = group.placements[f];
      const Tensor& tensor = vectors[placement.tensor];
      FeatureBags<T> of{};
      of.table = feature.table;
      of.num_bags = feature.bags;
      of.bags = {nullptr, bounds};
      of.combiner = placement.combiner;
      of.stride = placement.stride;
      of.max_nnz = feature.max_nnz;
      if (written) {
        of.out = mutable_data<T>(tensor) + placement.begin;
      } else {
        const RowLayout layout = RowLayout::of(tensor);
        of.grad = data<T>(tensor) + layout.position(placement.begin);
        of.stride = layout.position(placement.stride);
      }
      add_source(static_cast<int64_t>(f), of);
      features.push_back(of);
      bounds += feature.bags;
    }
    return features;
  }

  int64_t count_of(size_t t) const { return counts ? int64_data(*counts)[t] : 0; }

  // With checks on, raises for what the device has found in index and rows.
  void check_found(const DeviceContext& context) const {
    const int64_t bad_index = context.error_position(DeviceError::kGroupIndex, entries);
    const int64_t bad_row = context.error_position(DeviceError::kBagRow, entries);
    context.error_position(DeviceError::kBagOffset, entries + bags.numel());
    if (bad_index >= 0) index_error(op_, ": index[", bad_index, "] is no number of its table");
    if (bad_row >= 0) index_error(op_, ": an entry has a row that its table does not have");
  }

  // `limit` is what a number must be below.
  [[noreturn]] void bad_number(const char* name, int64_t position, int64_t number, int64_t table,
                               int64_t limit, const char* what) const {
    index_error(op_, ": ", name, "[", position, "] is ", number, ", but table ", table, " has ",
                limit, " ", what);
  }

 private:
  Tensor numbers(const Tensor& tensor, ScalarType dtype, int64_t size, const char* name) const {
    check_dtype(tensor, dtype, op_, name);
    check_dim(tensor, 1, op_, name);
    check_size(tensor, 0, size, op_, name);
    check(!index.defined() || same_device(index, tensor), op_, ": ", name,
          " is not on the device of index");
    return packed(tensor);
  }

  // Appends tensors that have an element for each key of a source.
  void add_of_sources(const std::vector<Tensor>& given, std::vector<Tensor>& list,
                      const char* name) const {
    for (const Feature& feature : group.features) {
      check(given.empty() ||
                (feature.source >= 0 && feature.source < static_cast<int64_t>(given.size())),
            op_, ": ", name, " has ", given.size(), " tensors, but a feature has source ",
            feature.source);
    }
    list.reserve(given.size());
    for (size_t s = 0; s < given.size(); ++s) {
      check_dim(given[s], 1, op_, Item{name, s});
      list.push_back(packed(given[s]));
    }
  }

  // The weights and keys of a feature's source, if it has any.
  template <class T>
  void add_source(int64_t f, FeatureBags<T>& of) const {
    if (sample_weights.empty() && keys.empty()) return;
    const int64_t s = group.features[f].source;
    of.key_start = int64_data(*key_starts) + f;
    // Copied vectors take no weights.
    if (!sample_weights.empty() && sample_weights[s].numel() > 0 &&
        of.combiner != Combiner::kNone) {
      check_dtype(sample_weights[s], kAccumulateType<T>, op_, "sample_weights");
      of.sample_weights = data<Acc<T>>(sample_weights[s]);
      of.num_keys = sample_weights[s].numel();
      check_key_start(f, of, "sample_weights");
    }
    if (keys.empty()) return;
    const ScalarType type = keys[s].scalar_type();
    check(type == ScalarType::Long || type == ScalarType::Int, op_, ": keys[", s,
          "] must be int64 or int32, got ", torch::headeronly::toString(type));
    check(of.sample_weights == nullptr || of.num_keys == keys[s].numel(), op_, ": sample_weights[",
          s, "] must have one element for each of the ", keys[s].numel(), " keys, got ",
          of.num_keys);
    of.keys = keys[s].const_data_ptr();
    of.wide_keys = type == ScalarType::Long;
    of.num_keys = keys[s].numel();
    check_key_start(f, of, "keys");
  }

  template <class T>
  void check_key_start(int64_t f, const FeatureBags<T>& of, const char* name) const {
    if constexpr (!kOnDevice) {
      const int64_t first = of.first(), n = of.num_entries();
      check(first >= 0 && first <= of.num_keys && n <= of.num_keys - first, op_, ": features[", f,
            "] has keys ", first, " to ", first + n, " of its source, but ", name, "[",
            group.features[f].source, "] has ", of.num_keys, " elements");
    }
  }

  // On the CPU. Bags must rise from 0, whatever they are later, and stay within the entries.
  void check_bags() {
    const int32_t* bounds = data<int32_t>(bags);
    const Source all{nullptr, bounds, false, false, entries, group.num_bags};
    const ParallelFor parallel_for = torch_parallel_for();
    int64_t bag = 0;
    check(bounds[0] == 0, op_, ": bags must begin with 0, got ", bounds[0]);
    for (Feature& feature : group.features) {
      const cpu::BagCheck bad =
          cpu::check_bags(all, bag, bag + feature.bags, feature.max_nnz, parallel_for);
      check(bad.what != cpu::BadBag::kOffset, op_,
            ": bags must rise to at most len(index) = ", entries, ", but bags[", bad.position,
            "] is ", bad.position < 0 ? 0 : bounds[bad.position]);
      check(bad.what != cpu::BadBag::kTooLong, op_, ": bag ", bad.position,
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
      check(count_of(t) >= 0 && count_of(t) <= most, op_, ": counts[", t, "] is ", count_of(t),
            ", but must be in [0, ", most, "]");
    }
  }

 public:
  // On the CPU: the first entry of a table, and how many it has.
  std::pair<int64_t, int64_t> entries_of(size_t t) const {
    const int64_t begin = group.table_features[t], end = group.table_features[t + 1];
    if (begin == end) return {0, 0};
    const Feature &first = group.features[begin], &last = group.features[end - 1];
    return {first.first_entry, last.first_entry + last.n - first.first_entry};
  }
  // On the CPU: the table that an entry is of.
  int64_t table_of(int64_t entry) const {
    size_t f = 0;
    while (entry >= group.features[f].first_entry + group.features[f].n) ++f;
    return group.features[f].table;
  }

 private:
  const char* op_;
};

}  // namespace sparsekit::ops
