// Arguments of ops that process many tables in one call: sources hold the keys, and each feature
// assigns a run of bags to a table. sparsekit/ops/_group.py explains the columns of `features`.
#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

#include "kept_list.h"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/group.h"
#include "sparsekit/init_rows.h"

namespace sparsekit::ops {

// Each struct below is a row of one of the matrices that describe a call.
struct FeatureRow {
  static constexpr ScalarType kDtype = ScalarType::Long;
  int64_t table, source, first_bag, bags, combiner, max_nnz, tensor, begin, stride;
};
struct TableRow {
  static constexpr ScalarType kDtype = ScalarType::Long;
  int64_t hash_table, capacity, world_size;
};
struct InitializerRow {
  static constexpr ScalarType kDtype = ScalarType::Double;
  double distribution, a, b;
};
static_assert(sizeof(FeatureRow) == 9 * sizeof(int64_t));
static_assert(sizeof(TableRow) == 3 * sizeof(int64_t));
static_assert(sizeof(InitializerRow) == 3 * sizeof(double));

// An int64 matrix with one column for each member of Row. It is always on the host.
template <class Row>
class Descriptor {
 public:
  Descriptor(const Arguments& given, const char* name, const Tensor& matrix) {
    given.check(matrix.is_cpu(), name, " must be on the CPU");
    given.check_dtype(name, matrix, Row::kDtype);
    size_ = static_cast<size_t>(given.check_dim(name, matrix, 2).first);
    given.check_size(name, matrix, 1, sizeof(Row) / sizeof(int64_t));
    matrix_ = packed(matrix);
    rows_ = data<Row>(matrix_);
  }

  size_t size() const { return size_; }
  const Row& operator[](size_t i) const { return rows_[i]; }

 private:
  Tensor matrix_;
  size_t size_;
  const Row* rows_;
};

// The location of a feature's vectors: the index of a tensor in a list, and the layout within the
// tensor.
struct Placement {
  Combiner combiner;
  int64_t tensor, begin, stride;
};

// Returns each table's initializer without the seed, which stays in memory on the engine's
// device.
inline std::vector<Initializer> initializers_of(const Arguments& given, const Tensor& matrix,
                                                const Views& seeds, size_t num_tables) {
  const Descriptor<InitializerRow> rows(given, "initializers", matrix);
  given.check_size("initializers", matrix, 0, static_cast<int64_t>(num_tables));
  given.check_list("seeds", seeds.size(), num_tables);
  std::vector<Initializer> initializers;
  initializers.reserve(num_tables);
  for (size_t t = 0; t < num_tables; ++t) {
    const auto& [distribution, a, b] = rows[t];
    given.check_one({"seeds", t}, seeds[t]);
    given.check(distribution == 0 || distribution == 1 || distribution == 2,
                "distribution of initializers[", t,
                "] must be 0 (constant), 1 (uniform) or 2 (normal), got ", distribution);
    initializers.push_back({0, static_cast<Distribution>(static_cast<int64_t>(distribution)),
                            static_cast<float>(a), static_cast<float>(b)});
  }
  return initializers;
}

// The rows of the matrix `features`. The fields that refer to sources are not checked here.
class GroupFeatures {
 public:
  std::vector<Feature> features;
  std::vector<Placement> placements;
  // Table t has the features [table_features[t], table_features[t + 1]).
  std::vector<int64_t> table_features;
  int64_t num_bags = 0;  // total number of bags of all features

  GroupFeatures(const Arguments& given, const Tensor& descriptors, size_t num_tables)
      : given_(given) {
    const Descriptor<FeatureRow> rows(given, "features", descriptors);
    given.check(static_cast<int64_t>(std::max(rows.size(), num_tables)) <= kMostNumbered,
                "too many tables or features");
    table_features.assign(num_tables + 1, 0);
    features.reserve(rows.size());
    placements.reserve(rows.size());
    for (size_t f = 0; f < rows.size(); ++f) {
      const FeatureRow& row = rows[f];
      const int64_t least = features.empty() ? 0 : features.back().table;
      must_be_in(f, "table", row.table, least, static_cast<int64_t>(num_tables) - 1);
      must_be_in(f, "bags", row.bags, 0, kMostElements);
      must_be_in(f, "combiner", row.combiner, 0, static_cast<int64_t>(Combiner::kNone));
      must_be_in(f, "max_nnz", row.max_nnz, 0, kAny);
      const auto combiner = static_cast<Combiner>(row.combiner);
      const int64_t most = combiner == Combiner::kNone ? 1 : kAny;
      features.push_back(
          {row.table, row.source, row.first_bag, row.bags, std::min(row.max_nnz, most), 0, 0, 0});
      placements.push_back({combiner, row.tensor, row.begin, row.stride});
      num_bags = std::min(num_bags + row.bags, kMostElements);
      ++table_features[row.table + 1];
    }
    std::partial_sum(table_features.begin(), table_features.end(), table_features.begin());
  }

  size_t num_tables() const { return table_features.size() - 1; }

 protected:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  void must_be_in(size_t f, const char* name, int64_t value, int64_t low, int64_t high) const {
    given_.check(value >= low && value <= high, name, " of features[", f, "] is ", value,
                 ", but must be in [", low, ", ", high, "]");
  }

  const Arguments& given_;
};

// Features and the sources of keys that they refer to.
class GroupInput : public GroupFeatures {
 public:
  std::vector<Source> sources;
  // Total numbers of entries and of bags in the sources.
  int64_t entries = 0;
  int64_t source_bags = 0;

  GroupInput(Arguments& given, const Tensors& keys, const Tensors& offsets,
             const Tensor& descriptors, size_t num_tables)
      : GroupFeatures(given, descriptors, num_tables) {
    given.check_list("offsets", offsets.size(), keys.size());
    sources.reserve(keys.size());
    keys_.reserve(keys.size());
    offsets_.reserve(keys.size());
    for (size_t s = 0; s < keys.size(); ++s) add_source(given, s, keys[s], offsets[s]);
    given.check(entries <= kMostNumbered, "keys have ", entries,
                " elements together; at most 2^31 - 1 are supported");
    given.check_elements("offsets", {source_bags});
    for (size_t f = 0; f < features.size(); ++f) {
      Feature& feature = features[f];
      must_be_in(f, "source", feature.source, 0, static_cast<int64_t>(sources.size()) - 1);
      const Source& source = sources[feature.source];
      must_be_in(f, "first_bag", feature.first_bag, 0, source.bags);
      must_be_in(f, "bags", feature.bags, 0, source.bags - feature.first_bag);
      feature.n = source.n;
    }
    check_apart();
  }

  // On the CPU: checks the offsets and computes the range of entries of each feature.
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

  // With checks on, throws the error found by cuda::begin_group, if there is one.
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
    given_.error("offsets[", s, "] must rise from 0 to len(keys[", s, "]) = ", sources[s].n,
                 ", but its element ", position, " is ", value(offsets_[s], position, context));
  }
  [[noreturn]] void wrong_key(int64_t s, int64_t position, const DeviceContext& context) const {
    given_.index_error("keys[", s, "][", position, "] is ", value(keys_[s], position, context),
                       ", which is no row of its table, that has no hash table");
  }

 private:
  void add_source(Arguments& given, size_t s, const Tensor& keys, const Tensor& offsets) {
    const Item of_keys("keys", s), of_offsets("offsets", s);
    const bool wide_keys = given.check_wide(of_keys, given.read(of_keys, keys));
    const bool wide_offsets = given.check_wide(of_offsets, given.read_ahead(of_offsets, offsets));
    const int64_t n = given.check_dim(of_keys, keys, 1).first;
    const int64_t num_offsets = given.check_dim(of_offsets, offsets, 1).first;
    keys_.push_back(packed(keys));
    offsets_.push_back(packed(offsets));
    Source source{keys_.back().const_data_ptr(), nullptr, wide_keys, wide_offsets, n, n};
    if (num_offsets > 0) {
      source.offsets = offsets_.back().const_data_ptr();
      source.bags = num_offsets - 1;
    }
    sources.push_back(source);
    entries = std::min(entries + source.n, kMostElements);
    source_bags = std::min(source_bags + source.bags, kMostElements + 1);
  }

  // Checks that no bag belongs to two features; otherwise there could be more entries than keys.
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
      given_.check(one.source != other.source || one.first_bag + one.bags <= other.first_bag,
                   "features[", by_source_[place - 1], "] and features[", by_source_[place],
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
    given_.error("bag ", bag, " of source ", s, " has more keys than its max_nnz=", most);
  }

  // Returns an element of an int32 or int64 tensor.
  static int64_t value(const Tensor& tensor, int64_t i, const DeviceContext& context) {
    if (tensor.scalar_type() == ScalarType::Long) return context.value(tensor, i);
    const Tensor one = torch::stable::narrow(const_cast<Tensor&>(tensor), 0, i, 1);
    return context.value(torch::stable::to(one, ScalarType::Long), 0);
  }

  std::vector<Tensor> keys_, offsets_;  // own the memory that the sources point to
  std::vector<int32_t> by_source_;      // indices of features, by source, then by first bag
};

// Allocates the uninitialised results `bags` and `key_starts` of a call.
inline std::pair<Tensor, Tensor> new_bags(const GroupInput& input, const Tensor& like) {
  const auto count = static_cast<int64_t>(input.features.size());
  return {new_output(like, {input.source_bags + 1}, ScalarType::Int),
          new_output(like, {count}, ScalarType::Long)};
}

// The arguments and workspace of a call on a device.
struct DeviceCall {
  cuda::GroupCall call;
  cuda::GroupBags bags;
  Workspace memory;

  // `tables` holds those fields of the call that `input` does not determine. workspace_bytes(call)
  // returns the size of the workspace. The context must live as long as this object.
  template <class WorkspaceBytes>
  DeviceCall(const GroupInput& input, const cuda::GroupCall& tables,
             const WorkspaceBytes& workspace_bytes, const std::pair<Tensor, Tensor>& results,
             const Tensor& like, const DeviceContext& context)
      : call(with_input(tables, input, context)),
        bags{mutable_data<int32_t>(results.first), mutable_data<int64_t>(results.second)},
        memory(workspace_bytes(call), like) {}

  // Fills the bags. With checks on, throws the error found in the input, if there is one.
  void begin(const GroupInput& input, const DeviceContext& context) const {
    cuda::begin_group(
        call, bags,
        {context.error_word(DeviceError::kGroupOffset), context.error_word(DeviceError::kGroupBag),
         context.error_word(DeviceError::kGroupKey)},
        memory.data(), context.stream());
    input.raise_found(context);
  }

 private:
  static cuda::GroupCall with_input(cuda::GroupCall call, const GroupInput& input,
                                    const DeviceContext& context) {
    call.sources = input.sources.data();
    call.num_sources = static_cast<int64_t>(input.sources.size());
    call.features = input.features.data();
    call.num_features = static_cast<int64_t>(input.features.size());
    call.num_bags = input.num_bags;
    call.entries = input.entries;
    call.kept = cuda::keep_descriptors(call, context.keeper());
    return call;
  }
};

// On the CPU: fills the bags, and sets the range of entries of each table. Table must be derived
// from AskedTable.
template <class Table>
void begin_on_cpu(GroupInput& input, std::vector<Table>& tables,
                  const std::pair<Tensor, Tensor>& results, const DeviceContext& context) {
  input.check_offsets(context);
  int64_t entry = 0;
  for (Table& table : tables) {
    table.first_entry = entry;
    for (int64_t f = 0; f < table.features; ++f) {
      const Feature& feature = input.features[table.first_feature + f];
      entry += feature.n;
      if (table.end < 0) continue;
      const int64_t bad =
          cpu::check_keys(input.sources[feature.source], feature.key_start,
                          feature.key_start + feature.n, table.end, torch_parallel_for());
      if (bad >= 0) input.wrong_key(feature.source, bad, context);
    }
    table.n = entry - table.first_entry;
  }
  cpu::write_bags(input.sources.data(), input.features.data(),
                  static_cast<int64_t>(input.features.size()), mutable_data<int32_t>(results.first),
                  mutable_data<int64_t>(results.second), torch_parallel_for());
}

}  // namespace sparsekit::ops
