// Pools the bags of all features in the same launches. Each block handles one feature, determined
// by the block's index. Bags are pooled as in pool_bags.cuh.
#include "sparsekit/group_embedding_bag.h"

#include <algorithm>

#include "cuda/descriptors.cuh"
#include "cuda/initial_row.cuh"
#include "cuda/pool_bags.cuh"

namespace sparsekit::cuda {
namespace {

template <class T>
struct PoolFeature {
  T* out;
  int64_t stride;
  const Acc<T>* sample_weights;  // may be null
  const void* keys;
  const int64_t* key_start;
  int64_t first_block;
  int32_t table;
  int32_t first_bag;  // index of the feature's first bag among the bags of all features
  int32_t num_keys;
  uint16_t columns;
  uint8_t combiner;
  uint8_t log2_lanes : 4, wide : 1, wide_keys : 1;
};

template <class T>
struct PoolTable {
  const T* weight;
  int64_t num_rows, stride;
  const int64_t* seed;  // may be null
  int32_t dim;
  int32_t first_bag;
  int32_t distribution;
  float a, b;
};

// Both `features` and `tables` have one extra element at the end, which marks the end of the last
// element's ranges.
template <class T>
struct PoolGroup {
  const PoolFeature<T>* features;
  const PoolTable<T>* tables;
  int32_t num_features;
  int32_t entries;
  int32_t rounds;  // number of times that each tile pools bags
  const int32_t* index;
  const int32_t* rows;    // may be null
  const int64_t* counts;  // may be null
  const int32_t* bags;
  int64_t* bad_row;
  int64_t* bad_index;

  SPARSEKIT_DEVICE int feature_of_block(int64_t block) const {
    return last_up_to(block, num_features, [this](int f) { return features[f].first_block; });
  }
  SPARSEKIT_DEVICE int feature_of_bag(int64_t bag) const {
    return last_up_to(bag, num_features, [this](int f) { return features[f].first_bag; });
  }
};

// Maximum number of pooling rounds per block.
constexpr int64_t kMostRounds = 8;

// Row index that stands for an initial vector.
constexpr int64_t kInitialRow = -2;

// The bags of a feature, with the members that pool_bags.cuh needs. The bounds of bags may be bad.
template <class T, bool kInitial>
struct FeaturePooling {
  using Element = T;
  static constexpr bool kCopies = true;

  const PoolGroup<T>& group;
  const PoolFeature<T>& feature;
  const PoolTable<T>& table;
  const T* weight;
  const Acc<T>* sample_weights;
  const int32_t* bags;
  int64_t num_rows, dim;
  int64_t limit;         // exclusive upper bound for elements of `index`
  int64_t first_listed;  // index of the table's first row among the rows of all tables
  int64_t key_of_entry;  // position of an entry's key, minus the entry
  Combiner combiner;
  int log2_lanes;

  SPARSEKIT_DEVICE FeaturePooling(const PoolGroup<T>& group, int f)
      : group(group),
        feature(group.features[f]),
        table(group.tables[feature.table]),
        weight(simt::global(table.weight)),
        sample_weights(feature.sample_weights),
        bags(group.bags + feature.first_bag),
        num_rows(table.num_rows),
        dim(table.dim),
        limit(group.counts == nullptr ? INT64_MAX : group.counts[feature.table]),
        first_listed(0),
        key_of_entry(feature.key_start == nullptr ? 0 : *simt::global(feature.key_start) - bags[0]),
        combiner(static_cast<Combiner>(feature.combiner)),
        log2_lanes(feature.log2_lanes) {
    if (group.rows == nullptr) return;
    first_listed = group.bags[table.first_bag];
    if (first_listed < 0 || first_listed > group.entries) first_listed = group.entries;
    if (limit > group.entries - first_listed) limit = group.entries - first_listed;
  }

  SPARSEKIT_DEVICE int64_t num_bags() const { return (&feature)[1].first_bag - feature.first_bag; }
  SPARSEKIT_DEVICE int64_t num_entries() const { return group.entries; }
  SPARSEKIT_DEVICE int64_t offset(int64_t bag) const { return bags[bag]; }
  SPARSEKIT_DEVICE Range range(int64_t bag) const {
    return good_range(bags[bag], bags[bag + 1], group.entries);
  }
  SPARSEKIT_DEVICE T* vector(int64_t bag) const {
    return simt::global(feature.out) + bag * feature.stride;
  }
  SPARSEKIT_DEVICE int64_t number(int64_t bag) const { return feature.first_bag + bag; }
  SPARSEKIT_DEVICE void check(int64_t) const {}

  SPARSEKIT_DEVICE bool has_key(int64_t i) const {
    return i + key_of_entry >= 0 && i + key_of_entry < feature.num_keys;
  }
  SPARSEKIT_DEVICE int64_t row(int64_t i, bool report) const {
    int64_t row = group.index[i];
    if (row >= limit) {
      if (report) simt::atomic_min(group.bad_index, i);
      return -1;
    }
    if (row >= 0 && group.rows != nullptr) row = group.rows[first_listed + row];
    if (row < 0) return kInitial && table.seed != nullptr && has_key(i) ? kInitialRow : -1;
    if (row < num_rows) return row;
    if (report) simt::atomic_min(group.bad_row, i);
    return -1;
  }
  SPARSEKIT_DEVICE Acc<T> weight_of(int64_t i) const {
    if (sample_weights == nullptr) return Acc<T>{1};
    return has_key(i) ? simt::global(sample_weights)[i + key_of_entry] : Acc<T>{0};
  }

  template <int kWidth>
  SPARSEKIT_DEVICE void read(int64_t i, int64_t row, int64_t element,
                             RowPiece<T, kWidth>& piece) const {
    if (!kInitial || row >= 0) return piece.read(weight + row * table.stride + element);
    const int64_t at = i + key_of_entry;
    const int64_t key = feature.wide_keys
                            ? static_cast<const int64_t*>(simt::global(feature.keys))[at]
                            : static_cast<const int32_t*>(simt::global(feature.keys))[at];
    const Initializer initializer{static_cast<uint64_t>(*simt::global(table.seed)),
                                  static_cast<Distribution>(table.distribution), table.a, table.b};
#pragma unroll
    for (int l = 0; l < kWidth; l += kDrawColumns) {
      float values[kDrawColumns];
      initial_values(initializer, key, (element + l) / kDrawColumns, values);
      // If an access is narrower than a draw, it may start at any column within the draw.
      const int first = kWidth < kDrawColumns ? static_cast<int>(element % kDrawColumns) : 0;
#pragma unroll
      for (int k = 0; k < kWidth && k < kDrawColumns; ++k) {
        const float low = first + k == 0 ? values[0] : values[1];
        const float high = first + k == 2 ? values[2] : values[3];
        const float value = first + k < 2 ? low : high;
        piece.at(l + k) = store<T>(Acc<T>{value});
      }
    }
  }
};

template <class T, bool kShortBags, bool kInitial, int kWidth>
SPARSEKIT_DEVICE void pool_feature(const PoolGroup<T>& group, int f, const LongBags<T>& long_bags) {
  const FeaturePooling<T, kInitial> in(group, f);
  const int64_t block = simt::block() - in.feature.first_block;
  const int64_t column = block % in.feature.columns;
  const int lane_in_tile = simt::thread() & ((1 << in.log2_lanes) - 1);
  const int64_t element = ((column << in.log2_lanes) + lane_in_tile) * kWidth;
  const bool long_too = long_bags.capacity > 0 && column == 0;
  // With longer bags, one round is enough work for a block, and a loop would need more registers.
  const int rounds = kShortBags ? group.rounds : 1;
  for (int round = 0; round < rounds; ++round) {
    const int64_t own_block = block / in.feature.columns * rounds + round;
    const int64_t tile = (own_block * kGroupThreads + simt::thread()) >> in.log2_lanes;
    if constexpr (kShortBags) {
      pool_own_short_bags<kWidth>(in, long_bags, long_too, tile * kBags, element);
    } else {
      pool_own_bag<kWidth>(in, long_bags, long_too, tile, element);
    }
  }
}

// Request only one block per multiprocessor if there are initial vectors: drawing them needs more
// registers than are available with two blocks.
template <class T, bool kShortBags, bool kInitial>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads, kInitial ? 1 : kGroupBlocksAtOnce)
    pool_features_kernel(PoolGroup<T> group, LongBags<T> long_bags) {
  const int f = group.feature_of_block(simt::block());
  if (group.features[f].wide) {
    pool_feature<T, kShortBags, kInitial, kWide<T>>(group, f, long_bags);
  } else {
    pool_feature<T, kShortBags, kInitial, 1>(group, f, long_bags);
  }
}

// Pools the parts of long bags. Each tile handles one part and has enough lanes for the longest
// rows.
template <class T, bool kInitial>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads, kInitial ? 1 : kGroupBlocksAtOnce)
    pool_feature_parts_kernel(PoolGroup<T> group, LongBags<T> long_bags, int log2_lanes) {
  const int64_t slot = tile_of_thread(log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  const FeaturePooling<T, kInitial> in(group, group.feature_of_bag(long_bags.parts[slot].bag));
  const int64_t bag = long_bags.parts[slot].bag - in.feature.first_bag;
  if (in.feature.wide) {
    pool_part<kWide<T>>(in, long_bags, slot, bag, first_element(kWide<T>, log2_lanes));
  } else {
    pool_part<1>(in, long_bags, slot, bag, first_element(1, log2_lanes));
  }
}
template <class T>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads, kGroupBlocksAtOnce)
    add_feature_parts_kernel(PoolGroup<T> group, LongBags<T> long_bags, Round round,
                             int log2_lanes) {
  const int64_t slot = tile_of_thread(log2_lanes);
  if (slot >= long_bags.capacity || long_bags.parts[slot].bag < 0) return;
  const FeaturePooling<T, false> in(group, group.feature_of_bag(long_bags.parts[slot].bag));
  const int64_t bag = long_bags.parts[slot].bag - in.feature.first_bag;
  if (in.feature.wide) {
    add_to_part<kWide<T>>(in, long_bags, round, slot, bag, first_element(kWide<T>, log2_lanes));
  } else {
    add_to_part<1>(in, long_bags, round, slot, bag, first_element(1, log2_lanes));
  }
}

template <class T>
RowShape shape_of_feature(const PooledTable<T>* tables, const FeatureBags<T>& feature) {
  const PooledTable<T>& table = tables[feature.table];
  // Wide accesses require every vector to begin at a multiple of 16 bytes.
  const bool aligned = feature.keeps_alignment(kWide<T>) && table.stride % kWide<T> == 0;
  return row_shape<T>(table.dim, table.weight, aligned ? feature.out : misaligned<T>());
}

// The features whose bags may be long, and a row shape that suits all of these features.
struct LongShape {
  bool any = false;
  int64_t dim = 0;
  int log2_lanes = 0, columns = 1;

  template <class T>
  explicit LongShape(const GroupPooling<T>& call) {
    for (int64_t f = 0; f < call.num_features; ++f) {
      const FeatureBags<T>& feature = call.features[f];
      if (std::min(feature.max_nnz, call.entries) <= kPart || feature.num_bags == 0) continue;
      const RowShape shape = shape_of_feature(call.tables, feature);
      any = true;
      dim = std::max(dim, call.tables[feature.table].dim);
      log2_lanes = std::max(log2_lanes, shape.log2_lanes);
      columns = std::max(columns, shape.columns);
    }
    dim = (dim + 7) / 8 * 8;  // keeps sums aligned for all tables
  }
};

template <class T>
int64_t descriptor_bytes(const GroupPooling<T>& call) {
  return Descriptors::bytes<PoolFeature<T>>(call.num_features + 1) +
         Descriptors::bytes<PoolTable<T>>(call.num_tables + 1);
}

template <class T>
struct PoolWorkspace {
  char* descriptors;
  LongBags<T> long_bags;

  PoolWorkspace(Arena& arena, const GroupPooling<T>& call, const LongShape& longest)
      : descriptors(arena.take<char>(descriptor_bytes(call))),
        long_bags(arena, longest.any ? call.entries : 0, longest.dim) {}
};

template <class T>
std::vector<PoolFeature<T>> pool_features(const GroupPooling<T>& call) {
  std::vector<PoolFeature<T>> pooled(static_cast<size_t>(call.num_features + 1));
  for (int64_t f = 0; f < call.num_features; ++f) {
    const FeatureBags<T>& of = call.features[f];
    const RowShape shape = shape_of_feature(call.tables, of);
    PoolFeature<T>& feature = pooled[static_cast<size_t>(f)];
    PoolFeature<T>& next = pooled[static_cast<size_t>(f + 1)];
    describe_bags(of, feature, next);
    feature.out = of.out;
    feature.keys = of.keys;
    feature.columns = static_cast<uint16_t>(shape.columns);
    feature.log2_lanes = static_cast<uint8_t>(shape.log2_lanes);
    feature.wide = shape.width != 1;
    feature.wide_keys = of.wide_keys;
  }
  return pooled;
}

// Divides the blocks of a launch among the features, and returns the number of blocks. Each tile
// pools bags_of_tile bags in each round.
template <class T>
int64_t share_out_blocks(std::vector<PoolFeature<T>>& features, int64_t bags_of_tile,
                         int64_t rounds) {
  const int64_t threads_of_block = kGroupThreads * rounds;
  for (size_t f = 0; f + 1 < features.size(); ++f) {
    const PoolFeature<T>& feature = features[f];
    PoolFeature<T>& next = features[f + 1];
    const int64_t tiles = (next.first_bag - feature.first_bag + bags_of_tile - 1) / bags_of_tile;
    const int64_t threads = tiles << feature.log2_lanes;
    const int64_t blocks = (threads + threads_of_block - 1) / threads_of_block;
    next.first_block = feature.first_block + blocks * feature.columns;
  }
  return features.back().first_block;
}

template <class T>
std::vector<PoolTable<T>> pool_tables(const GroupPooling<T>& call,
                                      const std::vector<PoolFeature<T>>& features) {
  std::vector<PoolTable<T>> pooled(static_cast<size_t>(call.num_tables + 1));
  for (size_t f = features.size() - 1; f-- > 0;) {
    pooled[static_cast<size_t>(features[f].table)].first_bag = features[f].first_bag;
  }
  for (int64_t t = 0; t < call.num_tables; ++t) {
    const PooledTable<T>& of = call.tables[t];
    PoolTable<T>& table = pooled[static_cast<size_t>(t)];
    table.weight = of.weight;
    table.num_rows = of.num_rows;
    table.stride = of.stride;
    table.seed = of.seed;
    table.dim = static_cast<int32_t>(of.dim);
    table.distribution = static_cast<int32_t>(of.initializer.distribution);
    table.a = of.initializer.a;
    table.b = of.initializer.b;
  }
  return pooled;
}

template <class T, bool kInitial>
void launch_pooling(const PoolGroup<T>& group, const LongBags<T>& long_bags, bool short_bags,
                    int64_t blocks, const LongShape& longest, void* stream) {
  clear_parts(long_bags, stream);
  const auto pool = short_bags ? pool_features_kernel<T, true, kInitial>
                               : pool_features_kernel<T, false, kInitial>;
  simt::launch("group_embedding_bag: bags", pool, simt::Grid{blocks, kGroupThreads}, stream, group,
               long_bags);
  if (long_bags.capacity == 0) return;
  simt::Grid grid = simt::grid_for(long_bags.capacity << longest.log2_lanes, kGroupThreads);
  grid.columns = longest.columns;
  simt::launch("group_embedding_bag: parts", pool_feature_parts_kernel<T, kInitial>, grid, stream,
               group, long_bags, longest.log2_lanes);
  for_each_round(group.entries, [&](Round round) {
    simt::launch("group_embedding_bag: sums of parts", add_feature_parts_kernel<T>, grid, stream,
                 group, long_bags, round, longest.log2_lanes);
  });
}

}  // namespace

template <class T>
int64_t group_embedding_bag_workspace_bytes(const GroupPooling<T>& call) {
  return Arena::bytes_of<PoolWorkspace<T>>(call, LongShape(call));
}

template <class T>
void group_embedding_bag(const GroupPooling<T>& call, int64_t* bad_row, int64_t* bad_index,
                         const KeepOnDevice& keep, void* workspace, void* stream) {
  int64_t num_bags = 0;
  for (int64_t f = 0; f < call.num_features; ++f) num_bags += call.features[f].num_bags;
  if (num_bags == 0) return;
  const LongShape longest(call);
  Arena arena(workspace);
  const PoolWorkspace<T> work(arena, call, longest);
  const bool short_bags = call.entries < kShort * num_bags;
  const int64_t bags_of_tile = short_bags ? kBags : 1;
  auto pooled = pool_features(call);
  int64_t rounds = 1, blocks = share_out_blocks(pooled, bags_of_tile, rounds);
  // If there are enough blocks to fill the device several times, give each block more short bags,
  // since a block must first wait for its feature's description.
  if (short_bags && blocks >= 4 * simt::kMostBlocks) {
    rounds = std::min(blocks / (2 * simt::kMostBlocks), kMostRounds);
    blocks = share_out_blocks(pooled, bags_of_tile, rounds);
  }
  PoolGroup<T> group{};
  Descriptors descriptors(work.descriptors);
  group.features = descriptors.add(pooled);
  // Tables remain the same from step to step.
  const std::vector<PoolTable<T>> tables = pool_tables(call, pooled);
  const bool few = static_cast<size_t>(descriptor_bytes(call)) <= Descriptors::kMostAlone;
  const auto bytes = static_cast<int64_t>(tables.size() * sizeof(PoolTable<T>));
  group.tables =
      few ? descriptors.add(tables) : static_cast<const PoolTable<T>*>(keep(tables.data(), bytes));
  descriptors.send(stream);
  group.num_features = static_cast<int32_t>(call.num_features);
  group.entries = static_cast<int32_t>(call.entries);
  group.rounds = static_cast<int32_t>(rounds);
  group.index = call.index;
  group.rows = call.rows;
  group.counts = call.counts;
  group.bags = call.features[0].bags.narrow;
  group.bad_row = bad_row;
  group.bad_index = bad_index;
  const bool initial =
      std::any_of(call.tables, call.tables + call.num_tables,
                  [](const PooledTable<T>& table) { return table.seed != nullptr; });
  const auto launch = initial ? launch_pooling<T, true> : launch_pooling<T, false>;
  launch(group, work.long_bags, short_bags, blocks, longest, stream);
}

SPARSEKIT_INSTANTIATE(group_embedding_bag_workspace_bytes)
SPARSEKIT_INSTANTIATE(group_embedding_bag)

}  // namespace sparsekit::cuda
