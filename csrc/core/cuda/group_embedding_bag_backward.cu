#include <algorithm>

#include "cuda/group_numbers.cuh"

namespace sparsekit::cuda {
namespace {

// The kinds of scaling that the features of a call require.
struct Ways {
  bool weighted = false, scaled = false, divided = false;

  template <class T>
  Ways(const FeatureBags<T>* features, int64_t num_features) {
    for (int64_t f = 0; f < num_features; ++f) {
      const bool has_weights = features[f].sample_weights != nullptr;
      const Combiner combiner = features[f].combiner;
      const bool divides = combiner == Combiner::kMean || combiner == Combiner::kSqrtn;
      weighted |= has_weights;
      scaled |= has_weights || divides;
      divided |= has_weights && divides;
    }
  }
};

// The tables of a call, with the features of all tables stored contiguously, and totals over the
// tables.
template <class T>
struct SumCall {
  const SummedTable<T>* tables;
  int64_t num_tables, entries;
  const FeatureBags<T>* features;
  int64_t num_features = 0, num_bags = 0, stride = 0;
  int64_t longest = 0;  // upper bound on the number of entries of a table

  explicit SumCall(const GroupSums<T>& sums)
      : tables(sums.tables),
        num_tables(sums.num_tables),
        entries(sums.entries),
        features(num_tables == 0 ? nullptr : tables[0].features) {
    for (int64_t t = 0; t < num_tables; ++t) {
      num_features += tables[t].num_features;
      stride = std::max(stride, tables[t].dim);
      int64_t n = 0;
      for (int64_t f = 0; f < tables[t].num_features; ++f) {
        const FeatureBags<T>& bags = tables[t].features[f];
        const bool limited = bags.max_nnz <= entries / std::max<int64_t>(bags.num_bags, 1);
        n += limited ? bags.num_bags * bags.max_nnz : entries;
      }
      longest = std::max(longest, std::min(n, entries));
    }
    for (int64_t f = 0; f < num_features; ++f) num_bags += features[f].num_bags;
    stride = (stride + 7) / 8 * 8;  // keeps partial sums aligned for all tables
  }
};

template <class T>
struct SumWorkspace {
  int32_t* entry;
  int64_t *row, *element;
  ScaledRow<Acc<T>>* scaled;
  Acc<T>* divisors;
  Pairs spare;
  RadixSort sort;
  SumLevels<T> levels{};

  SumWorkspace(Arena& arena, const SumCall<T>& call)
      : entry(arena.take<int32_t>(call.num_tables + 1)),
        row(arena.take<int64_t>(call.num_tables + 1)),
        element(arena.take<int64_t>(call.num_tables + 1)),
        spare{arena.take<uint32_t>(call.entries), arena.take<int32_t>(call.entries)},
        sort(arena, call.entries) {
    const Ways ways(call.features, call.num_features);
    scaled = arena.take<ScaledRow<Acc<T>>>(!ways.scaled    ? 0
                                           : ways.weighted ? call.entries
                                                           : call.num_bags);
    divisors = arena.take<Acc<T>>(ways.divided ? call.num_bags : 0);
    if (!ways.scaled) scaled = nullptr;
    if (!ways.divided) divisors = nullptr;
    levels.level[0].take(arena, call.entries, 0);
    for (int64_t chunks = (call.longest + kChunk - 1) / kChunk;;
         chunks = (2 * chunks + kChunk - 1) / kChunk) {
      SumLevel<T>& level = levels.level[levels.count++];
      level.chunks = arena.take<int32_t>(call.num_tables + 1);
      level.blocks = arena.take<int64_t>(call.num_tables + 1);
      levels.level[levels.count].take(arena, 2 * (level.n / kChunk + call.num_tables), call.stride);
      if (chunks <= 1) break;
    }
  }

  // Returns the sorted entries.
  Pairs sorted() const { return {levels.level[0].keys, levels.level[0].values}; }
};

// Workspace for sorting rows.
struct OrderWorkspace {
  uint32_t *keys, *sorted_keys;
  int32_t *numbers, *sorted_numbers;
  int64_t* at;
  char* sort;

  OrderWorkspace(Arena& arena, int64_t n)
      : keys(arena.take<uint32_t>(n)),
        sorted_keys(arena.take<uint32_t>(n)),
        numbers(arena.take<int32_t>(n)),
        sorted_numbers(arena.take<int32_t>(n)),
        at(arena.take<int64_t>(n)),
        sort(arena.take<char>(sort_workspace_bytes(n))) {}
};

template <class T>
int64_t descriptor_bytes(const SumCall<T>& call) {
  return Descriptors::bytes<SumFeature<T>>(call.num_features + 1) +
         Descriptors::bytes<SumTable>(call.num_tables + 1);
}

template <class T>
struct BackwardWorkspace {
  char* descriptors;
  SumWorkspace<T> sums;
  OrderWorkspace order;

  BackwardWorkspace(Arena& arena, const SumCall<T>& call, int64_t ordered_rows)
      : descriptors(arena.take<char>(descriptor_bytes(call))),
        sums(arena, call),
        order(arena, ordered_rows) {}
};

// Workspace for sums that are written to a SumRoom's memory.
template <class T>
struct RoomWorkspace {
  char* descriptors;
  SumWorkspace<T> sums;
  int64_t* at;

  RoomWorkspace(Arena& arena, const SumCall<T>& call)
      : descriptors(arena.take<char>(Descriptors::bytes<SumTarget>(call.num_tables) +
                                     descriptor_bytes(call))),
        sums(arena, call),
        at(arena.take<int64_t>(call.entries)) {}
};

// Workspace of find_row_runs(), which group_embedding_bag_update calls.
template <class T>
struct RunsWorkspace {
  SumWorkspace<T> sums;
  int32_t* begins;
  T* over_chunks;

  RunsWorkspace(Arena& arena, const SumCall<T>& call)
      : sums(arena, call),
        begins(arena.take<int32_t>(call.entries + call.num_tables)),
        over_chunks(arena.take<T>(sums.levels.level[1].n / 2 * call.stride)) {}
};

template <class T>
std::vector<SumFeature<T>> sum_features(const SumCall<T>& call) {
  std::vector<SumFeature<T>> features(static_cast<size_t>(call.num_features + 1));
  for (int64_t f = 0; f < call.num_features; ++f) {
    const FeatureBags<T>& of = call.features[f];
    SumFeature<T>& feature = features[static_cast<size_t>(f)];
    describe_bags(of, feature, features[static_cast<size_t>(f + 1)]);
    feature.grad = of.grad;
  }
  return features;
}

// Returns the shape of a table's gradients. Wide accesses require every gradient to begin at a
// multiple of 16 bytes.
template <class T>
RowShape shape_of_table(const SummedTable<T>& table) {
  RowShape shape = row_shape<T>(table.dim, table.grad);
  for (int64_t f = 0; f < table.num_features && shape.width != 1; ++f) {
    const FeatureBags<T>& bags = table.features[f];
    shape = row_shape<T>(table.dim, bags.keeps_alignment(kWide<T>) ? bags.grad : misaligned<T>());
  }
  return shape;
}

template <class T>
std::vector<SumTable> sum_tables(const SumCall<T>& call) {
  std::vector<SumTable> tables(static_cast<size_t>(call.num_tables + 1));
  for (int64_t t = 0; t < call.num_tables; ++t) {
    const RowShape shape = shape_of_table(call.tables[t]);
    SumTable& table = tables[static_cast<size_t>(t)];
    table.dim = static_cast<int32_t>(call.tables[t].dim);
    table.columns = static_cast<uint16_t>(shape.columns);
    table.log2_lanes = static_cast<uint8_t>(shape.log2_lanes);
    table.wide = shape.width != 1;
    tables[static_cast<size_t>(t + 1)].first_feature =
        table.first_feature + static_cast<int32_t>(call.tables[t].num_features);
  }
  return tables;
}

// Sorts the n rows of all tables, separately for each table. Writes the output position of each
// row's sum to group.at, and the sorted rows to sorted_rows.
template <class T>
void order_rows(const SumGroup<T>& group, int64_t n, int64_t* sorted_rows,
                const OrderWorkspace& work, void* stream) {
  const simt::Grid grid = simt::grid_for(n, kGroupThreads);
  simt::launch("group: rows to sort", rows_to_sort_kernel<T>, grid, stream, group, n, work.keys,
               work.numbers);
  sort_pairs(work.keys, work.sorted_keys, work.numbers, work.sorted_numbers, n, 32, work.sort,
             stream);
  const int32_t* numbers = work.sorted_numbers;
  if (group.num_tables > 1) {  // sort stably by table, so that the rows of a table stay in order
    simt::launch("group: tables to sort", tables_to_sort_kernel<T>, grid, stream, group, n, numbers,
                 work.keys);
    sort_pairs(work.keys, work.sorted_keys, numbers, work.numbers, n, bits_of(group.num_tables - 1),
               work.sort, stream);
    numbers = work.numbers;
  }
  simt::launch("group: places of rows", place_rows_kernel<T>, grid, stream, group, n, numbers,
               sorted_rows);
}

// Returns the group of a call, and adds its arrays to `descriptors`. The caller sets the fields
// that differ between gradients and updates.
template <class T>
SumGroup<T> sum_group(const GroupSums<T>& sums, const SumCall<T>& call, const SumWorkspace<T>& work,
                      Descriptors& descriptors, int64_t* bad_index) {
  SumGroup<T> group{};
  group.features = descriptors.add(sum_features(call));
  group.tables = descriptors.add(sum_tables(call));
  group.num_features = static_cast<int32_t>(call.num_features);
  group.num_tables = static_cast<int32_t>(call.num_tables);
  group.num_bags = static_cast<int32_t>(call.num_bags);
  group.entries = static_cast<int32_t>(call.entries);
  group.index = sums.index;
  group.rows = sums.rows;
  group.counts = sums.counts;
  group.bags = sums.bags;
  group.entry = work.entry;
  group.row = work.row;
  group.element = work.element;
  group.scaled = work.scaled;
  group.divisors = work.divisors;
  group.by_entry = Ways(call.features, call.num_features).weighted;
  group.divide_by = static_cast<Acc<T>>(sums.divisor);
  group.stride = call.stride;
  group.chunks = work.levels.level[0].chunks;
  group.bad_index = bad_index;
  return group;
}

// Returns the number of digits in the sort keys of up to num_rows rows.
template <class T>
int digits_of_keys(const SumCall<T>& call, int64_t num_rows) {
  return digits_of(bits_of(num_rows + call.num_tables));
}

// Prepares the sums of up to num_rows rows: sends `descriptors`, and computes where the data of
// each table begins, and the sort key of each entry.
template <class T>
void begin_sums(const SumGroup<T>& group, const SumCall<T>& call, int64_t num_rows,
                const SumWorkspace<T>& work, const Descriptors& descriptors,
                const UpdateShares& shares, void* stream) {
  descriptors.send_with("group: plan", plan_sums_kernel<T, LittleExtra>,
                        plan_sums_kernel<T, MuchExtra>, stream, group, work.levels, shares,
                        work.sort);
  if (group.divisors != nullptr) {
    simt::launch("group: divisors", group_divisors_kernel<T>,
                 simt::grid_for(int64_t{group.num_bags} * simt::kWarp, kGroupThreads), stream,
                 group);
  }
  const DigitCounts digits{work.sort, digits_of_keys(call, num_rows)};
  const int64_t threads = std::max(group.entries, group.num_bags);
  const int64_t blocks = simt::grid_for(threads, kNumberSteps * kSumThreads).blocks;
  simt::launch("group: numbers of entries", number_entries_kernel<T>, digits.grid(blocks), stream,
               group, digits, unsorted_pairs(digits.num_digits, work.spare, work.sorted()));
}

// Computes the sums of up to num_rows rows.
template <bool kAllRows, class T>
void finish_sums(const SumGroup<T>& group, const SumCall<T>& call, int64_t num_rows,
                 const SumWorkspace<T>& work, void* stream) {
  sort_by_digits(work.sort, digits_of_keys(call, num_rows), call.entries, work.spare, work.sorted(),
                 stream);
  int64_t lanes = 1, columns = 0;
  for (int64_t t = 0; t < call.num_tables; ++t) {
    const RowShape shape = shape_of_table(call.tables[t]);
    lanes = std::max(lanes, int64_t{shape.columns} << shape.log2_lanes);
    columns += shape.columns;
  }
  for (int i = 0; i < work.levels.count; ++i) {
    const SumLevel<T>&from = work.levels.level[i], &to = work.levels.level[i + 1];
    const Begins begins =
        i == 0 ? Begins{work.entry, 1} : Begins{work.levels.level[i - 1].chunks, 2};
    const auto sum =
        i == 0 ? sum_tables_kernel<T, true, kAllRows> : sum_tables_kernel<T, false, kAllRows>;
    // Each table has its own block for each column, even if the table has few chunks.
    const int64_t threads = to.n / 2 * lanes + columns * kGroupThreads;
    simt::launch("group: sums", sum, simt::strided_grid_for(threads, kGroupThreads), stream, group,
                 from, begins, to);
  }
}

template <class T>
int64_t rows_of(const GroupSums<T>& sums) {
  int64_t num_rows = 0;
  for (int64_t t = 0; t < sums.num_tables; ++t) num_rows += sums.tables[t].num_rows;
  return num_rows;
}

// Returns the number of rows to sort, or 0 if sums are not ordered by row.
template <class T>
int64_t ordered_rows_of(const GroupSums<T>& sums) {
  return sums.num_tables == 0 || sums.tables[0].sorted_rows == nullptr ? 0 : rows_of(sums);
}

}  // namespace

template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const GroupSums<T>& sums) {
  return Arena::bytes_of<BackwardWorkspace<T>>(SumCall<T>(sums), ordered_rows_of(sums));
}

template <class T>
void group_embedding_bag_backward(const GroupSums<T>& sums, int64_t* bad_index, void* workspace,
                                  void* stream) {
  if (sums.num_tables == 0) return;
  const SumCall<T> call(sums);
  const int64_t ordered_rows = ordered_rows_of(sums);
  Arena arena(workspace);
  const BackwardWorkspace<T> work(arena, call, ordered_rows);
  Descriptors descriptors(work.descriptors);
  SumGroup<T> group = sum_group(sums, call, work.sums, descriptors, bad_index);
  group.out = call.tables[0].grad;
  begin_sums(group, call, rows_of(sums), work.sums, descriptors, {}, stream);
  if (ordered_rows > 0) {
    group.at = work.order.at;
    order_rows(group, ordered_rows, sums.tables[0].sorted_rows, work.order, stream);
  }
  finish_sums<true>(group, call, rows_of(sums), work.sums, stream);
}

namespace {

// Copies the tables. In the copies, `grad` only indicates whether all accesses to the table's sums
// may be wide.
template <class T>
std::vector<SummedTable<T>> tables_at(const GroupSums<T>& sums, const SumRoom<T>& room) {
  std::vector<SummedTable<T>> tables(sums.tables, sums.tables + sums.num_tables);
  for (size_t t = 0; t < tables.size(); ++t) {
    const bool apart = room.row_strides[t] % kWide<T> == 0;
    tables[t].grad = apart ? room.out : misaligned<T>();
  }
  return tables;
}

template <class T>
std::vector<SumTarget> sum_targets(const GroupSums<T>& sums, const SumRoom<T>& room) {
  std::vector<SumTarget> targets;
  targets.reserve(static_cast<size_t>(sums.num_tables));
  for (int64_t t = 0; t < sums.num_tables; ++t) {
    targets.push_back({room.row_strides[t], room.num_rows(t, sums.tables[t].dim)});
  }
  return targets;
}

}  // namespace

template <class T>
int64_t group_embedding_bag_backward_at_workspace_bytes(const GroupSums<T>& sums) {
  return Arena::bytes_of<RoomWorkspace<T>>(SumCall<T>(sums));
}

template <class T>
void group_embedding_bag_backward_at(const GroupSums<T>& sums, const SumRoom<T>& room,
                                     int64_t* bad_index, int64_t* bad_row, void* workspace,
                                     void* stream) {
  if (sums.num_tables == 0) return;
  const std::vector<SummedTable<T>> tables = tables_at(sums, room);
  GroupSums<T> sums_at = sums;
  sums_at.tables = tables.data();
  const SumCall<T> call(sums_at);
  Arena arena(workspace);
  const RoomWorkspace<T> work(arena, call);
  Descriptors descriptors(work.descriptors);
  const SumTarget* targets = descriptors.add(sum_targets(sums, room));
  SumGroup<T> group = sum_group(sums, call, work.sums, descriptors, bad_index);
  group.out = room.out;
  group.at = work.at;
  group.bounded = true;
  begin_sums(group, call, sums.entries, work.sums, descriptors, {}, stream);
  simt::launch("group: rows to write", rows_to_write_kernel<T>,
               simt::grid_for(sums.entries, kGroupThreads), stream, group, targets, bad_row);
  finish_sums<true>(group, call, sums.entries, work.sums, stream);
}

template <class T>
int64_t sum_descriptor_bytes(const GroupSums<T>& sums) {
  return descriptor_bytes(SumCall<T>(sums));
}

template <class T>
int64_t row_runs_workspace_bytes(const GroupSums<T>& sums) {
  return Arena::bytes_of<RunsWorkspace<T>>(SumCall<T>(sums));
}

template <class T>
RowRuns<T> find_row_runs(const GroupSums<T>& sums, Descriptors& descriptors,
                         const UpdateShares& shares, int64_t* bad_index, void* workspace,
                         void* stream) {
  const SumCall<T> call(sums);
  Arena arena(workspace);
  const RunsWorkspace<T> work(arena, call);
  SumGroup<T> group = sum_group(sums, call, work.sums, descriptors, bad_index);
  group.out = work.over_chunks;
  group.begins = work.begins;
  group.bounded = true;
  begin_sums(group, call, sums.entries, work.sums, descriptors, shares, stream);
  finish_sums<false>(group, call, sums.entries, work.sums, stream);
  return {group, work.sums.levels.level[0].values};
}

SPARSEKIT_INSTANTIATE(group_embedding_bag_backward_workspace_bytes)
SPARSEKIT_INSTANTIATE(group_embedding_bag_backward)
SPARSEKIT_INSTANTIATE(group_embedding_bag_backward_at_workspace_bytes)
SPARSEKIT_INSTANTIATE(group_embedding_bag_backward_at)
SPARSEKIT_INSTANTIATE(sum_descriptor_bytes)
SPARSEKIT_INSTANTIATE(row_runs_workspace_bytes)
SPARSEKIT_INSTANTIATE(find_row_runs)

}  // namespace sparsekit::cuda
