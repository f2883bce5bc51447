// Arguments of the ops on many tables: sources of keys, and features, which say what each table is
// asked. sparsekit/ops/_group.py says what the columns mean.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "device_context.h"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/group.h"
#include "sparsekit/init_rows.h"

namespace sparsekit::ops {

constexpr int64_t kFeatureColumns = 9;
constexpr int64_t kTableColumns = 3;
constexpr int64_t kInitializerColumns = 3;

// Place of the vectors of a feature's bags in one of a list of tensors.
struct Placement {
  Combiner combiner;
  int64_t tensor, begin, stride;
};

// A descriptor: a matrix of numbers, on the host whatever the device.
inline Tensor host_matrix(const Tensor& matrix, ScalarType dtype, int64_t columns, const char* op,
                          const char* name) {
  check(matrix.is_cpu(), op, ": ", name, " must be on the CPU");
  check_dtype(matrix, dtype, op, name);
  check_dim(matrix, 2, op, name);
  check_size(matrix, 1, columns, op, name);
  return packed(matrix);
}

inline void check_list(size_t size, size_t expected, const char* op, const char* name) {
  check(size == expected, op, ": ", name, " must have ", expected, " element(s), got ", size);
}

// Raises unless all tensors are where `first` is.
inline void check_list_device(const Tensor& first, const std::vector<Tensor>& tensors,
                              const char* op, const char* name) {
  const bool on_cpu = first.is_cpu();
  for (size_t i = 0; i < tensors.size(); ++i) {
    const bool same = on_cpu ? tensors[i].is_cpu() : tensors[i].device() == first.device();
    if (!same) check(false, op, ": ", Item{name, i}, " is not on the device of the other tensors");
  }
}

// An initializer for each table, all but its seed, which stays where the engine is.
inline std::vector<Initializer> initializers_of(const Tensor& matrix,
                                                const std::vector<Tensor>& seeds, size_t num_tables,
                                                const char* op) {
  const Tensor columns_of =
      host_matrix(matrix, ScalarType::Double, kInitializerColumns, op, "initializers");
  check_size(columns_of, 0, static_cast<int64_t>(num_tables), op, "initializers");
  check_list(seeds.size(), num_tables, op, "seeds");
  const auto* columns = data<double>(columns_of);
  std::vector<Initializer> initializers;
  initializers.reserve(num_tables);
  for (size_t t = 0; t < num_tables; ++t, columns += kInitializerColumns) {
    const Tensor& seed = seeds[t];
    check(dtype_of(seed) == ScalarType::Long && seed.numel() == 1, op, ": seeds[", t,
          "] must have one element, an int64");
    check(columns[0] == 0 || columns[0] == 1 || columns[0] == 2, op,
          ": distribution of initializers[", t,
          "] must be 0 (constant), 1 (uniform) or 2 (normal), got ", columns[0]);
    initializers.push_back({0, static_cast<Distribution>(static_cast<int64_t>(columns[0])),
                            static_cast<float>(columns[1]), static_cast<float>(columns[2])});
  }
  return initializers;
}

// The rows of the matrix of features, without what they say of sources that are not there.
class GroupFeatures {
 public:
  std::vector<Feature> features;
  std::vector<Placement> placements;
  // Features of table t: from table_features[t] to table_features[t + 1] - 1.
  std::vector<int64_t> table_features;
  int64_t num_bags = 0;  // of all features

  GroupFeatures(const char* op, const Tensor& descriptors, int64_t num_tables) : op_(op) {
    const Tensor matrix =
        host_matrix(descriptors, ScalarType::Long, kFeatureColumns, op, "features");
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    check(matrix.size(0) <= kMost && num_tables <= kMost, op, ": too many tables or features");
    const int64_t* columns = int64_data(matrix);
    features.reserve(matrix.size(0));
    placements.reserve(matrix.size(0));
    table_features.assign(num_tables + 1, 0);
    for (int64_t f = 0; f < matrix.size(0); ++f, columns += kFeatureColumns) {
      const int64_t table = columns[0], bags = columns[3], combiner = columns[4];
      int64_t most = columns[5];
      must_be_in(f, "table", table, features.empty() ? 0 : features.back().table, num_tables - 1);
      must_be_in(f, "bags", bags, 0, kMostElements);
      must_be_in(f, "combiner", combiner, 0, static_cast<int64_t>(Combiner::kNone));
      must_be_in(f, "max_nnz", most, 0, kAny);
      const auto how = static_cast<Combiner>(combiner);
      if (how == Combiner::kNone) most = std::min<int64_t>(most, 1);
      features.push_back({table, columns[1], columns[2], bags, most, 0, 0, 0});
      placements.push_back({how, columns[6], columns[7], columns[8]});
      num_bags = std::min(num_bags + bags, kMostElements);
      ++table_features[table + 1];
    }
    std::partial_sum(table_features.begin(), table_features.end(), table_features.begin());
  }

  size_t num_tables() const { return table_features.size() - 1; }

 protected:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  void must_be_in(int64_t f, const char* name, int64_t value, int64_t low, int64_t high) const {
    check(value >= low && value <= high, op_, ": ", name, " of features[", f, "] is ", value,
          ", but must be in [", low, ", ", high, "]");
  }

  const char* op_;
};

// Features and what they are of.
class GroupInput : public GroupFeatures {
 public:
  std::vector<Source> sources;
  // Length of a result with an element for each entry, and how many bags all sources have.
  int64_t entries = 0;
  int64_t source_bags = 0;

  GroupInput(const char* op, const std::vector<Tensor>& keys, const std::vector<Tensor>& offsets,
             const Tensor& descriptors, int64_t num_tables)
      : GroupFeatures(op, descriptors, num_tables) {
    check_list(offsets.size(), keys.size(), op, "offsets");
    sources.reserve(keys.size());
    keys_.reserve(keys.size());
    offsets_.reserve(keys.size());
    for (size_t s = 0; s < keys.size(); ++s) add_source(keys[s], offsets[s], s);
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    check(entries <= kMost, op, ": keys have ", entries,
          " elements together; at most 2^31 - 1 are supported");
    check_elements({source_bags}, op, "offsets");
    for (size_t f = 0; f < features.size(); ++f) {
      Feature& feature = features[f];
      const auto row = static_cast<int64_t>(f);
      must_be_in(row, "source", feature.source, 0, static_cast<int64_t>(sources.size()) - 1);
      const Source& source = sources[feature.source];
      must_be_in(row, "first_bag", feature.first_bag, 0, source.bags);
      must_be_in(row, "bags", feature.bags, 0, source.bags - feature.first_bag);
      feature.n = source.n;
    }
    check_apart();
  }

  // On the CPU: checks what offsets are, and finds out how many entries there are of what.
  void check_offsets(const DeviceContext& context) {
    const ParallelFor parallel_for = torch_parallel_for();
    for (size_t place = 0; place < by_source_.size(); ++place) {
      const Feature& feature = features[by_source_[place]];
      const Source& source = sources[feature.source];
      const Feature* before = place == 0 ? nullptr : &features[by_source_[place - 1]];
      const bool is_first = before == nullptr || before->source != feature.source;
      const bool is_last = place + 1 == by_source_.size() ||
                           features[by_source_[place + 1]].source != feature.source;
      if (is_first && source.offset(0) != 0) wrong_offset(feature.source, 0, context);
      const int64_t rest = is_first ? 0 : before->first_bag + before->bags;
      check_bags(feature.source, rest, feature.first_bag, kAny, context, parallel_for);
      check_bags(feature.source, feature.first_bag, feature.first_bag + feature.bags,
                 feature.max_nnz, context, parallel_for);
      if (!is_last) continue;
      check_bags(feature.source, feature.first_bag + feature.bags, source.bags, kAny, context,
                 parallel_for);
      if (source.offset(source.bags) != source.n)
        wrong_offset(feature.source, source.bags, context);
    }
    int64_t entry = 0;
    for (Feature& feature : features) {
      const Source& source = sources[feature.source];
      feature.key_start = source.offset(feature.first_bag);
      feature.n = source.offset(feature.first_bag + feature.bags) - feature.key_start;
      feature.first_entry = entry;
      entry += feature.n;
    }
  }

  // Raises what cuda::begin_group has found, with checks on.
  void raise_found(const DeviceContext& context) const {
    std::vector<int64_t> first_offset, key_start;
    int64_t offset = 0, key = 0;
    for (const Source& source : sources) {
      first_offset.push_back(offset);
      key_start.push_back(key);
      offset += source.bags + 1;
      key += source.n;
    }
    const int64_t bad_offset = context.error_position(DeviceError::kGroupOffset, offset);
    const int64_t long_bag = context.error_position(DeviceError::kGroupBag, offset);
    const int64_t bad_key = context.error_position(DeviceError::kGroupKey, key);
    const auto within = [](const std::vector<int64_t>& begins, int64_t position) {
      const auto after = std::upper_bound(begins.begin(), begins.end(), position);
      const int64_t s = after - begins.begin() - 1;
      return std::pair(s, position - begins[s]);
    };
    if (bad_offset >= 0) {
      const auto [s, position] = within(first_offset, bad_offset);
      wrong_offset(s, position, context);
    }
    if (long_bag >= 0) {
      const auto [s, bag] = within(first_offset, long_bag);
      for (const Feature& feature : features) {
        if (feature.source != s || bag < feature.first_bag) continue;
        if (bag < feature.first_bag + feature.bags) long_bag_of(s, bag, feature.max_nnz);
      }
    }
    if (bad_key >= 0) {
      const auto [s, position] = within(key_start, bad_key);
      wrong_key(s, position, context);
    }
  }

  [[noreturn]] void wrong_offset(int64_t s, int64_t position, const DeviceContext& context) const {
    throw std::invalid_argument(message(op_, ": offsets[", s, "] must rise from 0 to len(keys[", s,
                                        "]) = ", sources[s].n, ", but its element ", position,
                                        " is ", value(offsets_[s], position, context)));
  }
  [[noreturn]] void wrong_key(int64_t s, int64_t position, const DeviceContext& context) const {
    index_error(op_, ": keys[", s, "][", position, "] is ", value(keys_[s], position, context),
                ", which is no row of its table, that has no hash table");
  }

 private:
  void add_source(const Tensor& keys, const Tensor& offsets, size_t s) {
    const ScalarType key_type = dtype_of(keys), offset_type = dtype_of(offsets);
    const auto is_index = [](ScalarType type) {
      return type == ScalarType::Long || type == ScalarType::Int;
    };
    check(is_index(key_type), op_, ": keys[", s, "] must be int64 or int32, got ",
          torch::headeronly::toString(key_type));
    check(is_index(offset_type), op_, ": offsets[", s, "] must be int64 or int32, got ",
          torch::headeronly::toString(offset_type));
    const int64_t dims = keys.dim(), offset_dims = offsets.dim();
    check(dims == 1, op_, ": keys[", s, "] must have 1 dimension(s), got ", dims);
    check(offset_dims == 1, op_, ": offsets[", s, "] must have 1 dimension(s), got ", offset_dims);
    const int64_t n = keys.numel(), num_offsets = offsets.numel();
    keys_.push_back(packed(keys));
    offsets_.push_back(packed(offsets));
    Source source{keys_.back().const_data_ptr(),   nullptr, key_type == ScalarType::Long,
                  offset_type == ScalarType::Long, n,       n};
    if (num_offsets > 0) {
      source.offsets = offsets_.back().const_data_ptr();
      source.bags = num_offsets - 1;
    }
    check_elements({source.n}, op_, "keys");
    check_elements({source.bags}, op_, "offsets");
    sources.push_back(source);
    entries = std::min(entries + source.n, kMostElements);
    source_bags = std::min(source_bags + source.bags, kMostElements + 1);
  }

  // An entry is of one feature, or there would be more of them than keys.
  void check_apart() {
    by_source_.resize(features.size());
    std::iota(by_source_.begin(), by_source_.end(), 0);
    const auto before = [this](int32_t a, int32_t b) {
      const Feature &x = features[a], &y = features[b];
      return std::tuple(x.source, x.first_bag, x.bags) < std::tuple(y.source, y.first_bag, y.bags);
    };
    if (!std::is_sorted(by_source_.begin(), by_source_.end(), before)) {
      std::sort(by_source_.begin(), by_source_.end(), before);
    }
    for (size_t place = 1; place < by_source_.size(); ++place) {
      const Feature& one = features[by_source_[place - 1]];
      const Feature& other = features[by_source_[place]];
      check(one.source != other.source || one.first_bag + one.bags <= other.first_bag, op_,
            ": features[", by_source_[place - 1], "] and features[", by_source_[place],
            "] have bags of source ", one.source,
            " in common; where two tables are asked the same, it must be a source for each");
    }
  }

  void check_bags(int64_t s, int64_t first, int64_t last, int64_t most,
                  const DeviceContext& context, const ParallelFor& parallel_for) const {
    const cpu::BagCheck bad = cpu::check_bags(sources[s], first, last, most, parallel_for);
    if (bad.what == cpu::BadBag::kNone) return;
    if (bad.what == cpu::BadBag::kOffset) wrong_offset(s, bad.position, context);
    long_bag_of(s, bad.position, most);
  }

  [[noreturn]] void long_bag_of(int64_t s, int64_t bag, int64_t most) const {
    throw std::invalid_argument(
        message(op_, ": bag ", bag, " of source ", s, " has more keys than its max_nnz=", most));
  }

  // An element of a tensor of either width.
  static int64_t value(const Tensor& tensor, int64_t i, const DeviceContext& context) {
    if (tensor.scalar_type() == ScalarType::Long) return context.value(tensor, i);
    const Tensor one = torch::stable::narrow(const_cast<Tensor&>(tensor), 0, i, 1);
    return context.value(torch::stable::to(one, ScalarType::Long), 0);
  }

  std::vector<Tensor> keys_, offsets_;  // what sources point to
  std::vector<int32_t> by_source_;      // features in order of sources and bags
};

}  // namespace sparsekit::ops
