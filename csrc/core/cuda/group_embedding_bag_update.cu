#include "cuda/group_sums.cuh"
#include "cuda/update_rows.cuh"

namespace sparsekit::cuda {
namespace {

// Gradients of a table's distinct rows. Each gradient is summed when it is read, in the same order
// as in sum_tables_kernel.
template <class T>
struct SummedGradients {
  static constexpr bool kOfLookup = true;

  struct Found {
    int64_t row;
    int32_t begin, end;  // range of the row's entries, counted within the table
  };

  GradientRows<T> bags;
  const int32_t* rows;
  const int32_t* begins;
  const int32_t* values;  // values of the table's sorted entries
  const T* sums;          // sums of rows that span several chunks, indexed by the row's first chunk
  int64_t stride, n;
  Acc<T> divide_by;

  SPARSEKIT_DEVICE SummedGradients(const RowRuns<T>& runs, int t)
      : bags(runs.group, t),
        rows(runs.group.rows + runs.group.entry[t]),
        begins(runs.group.begins + runs.group.key_start(t)),
        values(runs.values + runs.group.entry[t]),
        sums(runs.group.sums_over_chunks(t)),
        stride(runs.group.stride),
        n(runs.group.row[t + 1] - runs.group.row[t]),
        divide_by(runs.group.divide_by) {}

  SPARSEKIT_DEVICE Found find(int64_t i) const {
    if (i >= n) return {-1, 0, 0};
    const int32_t* of_row = simt::global(begins + i);
    return {*simt::global(rows + i), of_row[0], of_row[1]};
  }

  template <int kWidth>
  SPARSEKIT_DEVICE simt::Vec<T, kWidth> read(const Found& found, int64_t, int, int at) const {
    constexpr auto kEach = static_cast<int32_t>(kChunk);
    if (found.begin >= found.end) return {};
    if (found.begin / kEach != (found.end - 1) / kEach) {
      return cuda::read<T, kWidth>(sums + found.begin / kEach * stride + at);
    }
    simt::Vec<T, kWidth> gradient{};
    const int32_t* own = simt::global(values + found.begin);
    const auto n = static_cast<uint32_t>(found.end - found.begin);
    sum_runs<kWidth>(
        0, n, n, at, bags, [&](uint32_t k) { return Entry{0, own[k]}; },
        [&](Run, uint32_t, const Acc<T>(&sum)[kWidth]) {
          for (int j = 0; j < kWidth; ++j) gradient.at[j] = divided_sum<T>(sum[j], divide_by);
        });
    return gradient;
  }
};

// The tables of a launch; the arrays are in device memory.
template <class T>
struct SummedTables {
  using Gradients = SummedGradients<T>;
  const Share* shares;
  const int64_t* first_blocks;
  const SteppedTable<T>* tables;  // all tables of the call
  int32_t count;
  RowRuns<T> runs;

  SPARSEKIT_DEVICE const SteppedTable<T>& table(int i) const { return tables[shares[i].table]; }
  SPARSEKIT_DEVICE Gradients gradients(int i) const { return Gradients(runs, shares[i].table); }
};

// Returns the shape of a table's rows in an update. Accesses are wide only if the gradients of bags
// are also aligned for wide accesses.
template <class Rule, class T>
RowShape shape_of_update(const SteppedTable<T>& table, const SummedTable<T>& sums, bool per_row) {
  constexpr int kWidth = kWide<Acc<T>>;
  bool aligned = true;
  for (int64_t f = 0; f < sums.num_features; ++f) {
    const FeatureBags<T>& bags = sums.features[f];
    const auto address = reinterpret_cast<uintptr_t>(bags.grad);
    aligned = aligned && bags.keeps_alignment(kWidth) && address % (kWidth * sizeof(T)) == 0;
  }
  const T* grad = aligned ? nullptr : misaligned<T>();
  return shape_of_step<Rule>(table.table, grad, per_row);
}

template <class T>
int64_t descriptor_bytes(const GroupSums<T>& sums) {
  return Descriptors::bytes<SteppedTable<T>>(sums.num_tables) +
         2 * Descriptors::bytes<Share>(sums.num_tables) + sum_descriptor_bytes(sums);
}

// Returns a number of blocks large enough for a launch's shares. `rows` is the maximum total number
// of rows in all shares; their distribution among the shares does not matter.
int64_t most_blocks(const std::vector<Share>& shares, int64_t rows) {
  int64_t threads = 0, columns = 0;
  for (const Share& share : shares) {
    threads = std::max(threads, share.threads(rows));
    columns += share.columns;
  }
  return std::min(kMostUpdateBlocks, threads / kGroupThreads) + columns;
}

template <class Rule, class T, int kWidth>
void launch_update(const DeviceShares& own, int64_t blocks, const SummedTables<T>& tables,
                   const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                   void* stream) {
  if (own.count == 0) return;
  SummedTables<T> launch = tables;
  launch.shares = own.shares;
  launch.first_blocks = own.first_blocks;
  launch.count = own.count;
  simt::Grid grid{blocks, kGroupThreads};
  using StepConstants = typename Rule::template StepConstants<Acc<T>>;
  grid.shared_bytes = sizeof(Block<T, SummedGradients<T>, StepConstants>);
  simt::launch("update_rows", update_rows_kernel<Rule, T, kWidth, SummedTables<T>>, grid, stream,
               launch, rule, number, rounding, bad);
}

}  // namespace

template <class T>
int64_t group_embedding_bag_update_workspace_bytes(const GroupSums<T>& sums) {
  Arena arena;
  arena.take<char>(descriptor_bytes(sums));
  arena.take<int64_t>(sums.num_tables + 2);
  arena.take<char>(row_runs_workspace_bytes(sums));
  return arena.bytes();
}

template <class Rule, class T>
void group_embedding_bag_update(const GroupSums<T>& sums, const SteppedTable<T>* tables,
                                const Rule& rule, StepNumber number, Rounding rounding,
                                int64_t* bad_index, int64_t* bad_row,
                                const std::function<void()>& before_changes,
                                const KeepOnDevice& keep, void* workspace, void* stream) {
  constexpr int kWidest = kWide<Acc<T>>;
  std::vector<Share> wide, narrow;
  for (int64_t t = 0; t < sums.num_tables; ++t) {
    if (sums.tables[t].num_rows <= 0) continue;
    const RowShape shape = shape_of_update<Rule>(tables[t], sums.tables[t], number.per_row);
    (shape.width == 1 ? narrow : wide).emplace_back(t, shape);
  }
  Arena arena(workspace);
  const int64_t bytes = descriptor_bytes(sums);
  Descriptors descriptors(arena.take<char>(bytes));
  // These descriptors remain the same while the tables and the alignment of gradients do.
  Descriptors kept(nullptr);
  kept.add(std::vector<SteppedTable<T>>(tables, tables + sums.num_tables));
  kept.add(wide);
  kept.add(narrow);
  const bool few = static_cast<size_t>(bytes) <= Descriptors::kMostAlong;
  const std::vector<char>& all_kept = kept.all();
  const void* on_device = few ? descriptors.add(all_kept)
                              : keep(all_kept.data(), static_cast<int64_t>(all_kept.size()));
  DescriptorArena places(const_cast<void*>(on_device));
  SummedTables<T> all{};
  all.tables = places.take<SteppedTable<T>>(sums.num_tables);
  int64_t* first_blocks = arena.take<int64_t>(sums.num_tables + 2);
  const auto place = [&](const std::vector<Share>& shares) {
    const auto count = static_cast<int32_t>(shares.size());
    const DeviceShares launch{places.take<Share>(count), first_blocks, count};
    first_blocks += count + 1;
    return launch;
  };
  const DeviceShares of_wide = place(wide);
  const UpdateShares shares{of_wide, place(narrow)};
  all.runs = find_row_runs(sums, descriptors, shares, bad_index,
                           arena.take<char>(row_runs_workspace_bytes(sums)), stream);
  before_changes();
  launch_update<Rule, T, kWidest>(shares.wide, most_blocks(wide, sums.entries), all, rule, number,
                                  rounding, bad_row, stream);
  launch_update<Rule, T, 1>(shares.narrow, most_blocks(narrow, sums.entries), all, rule, number,
                            rounding, bad_row, stream);
}

SPARSEKIT_INSTANTIATE(group_embedding_bag_update_workspace_bytes)
SPARSEKIT_INSTANTIATE_RULES(group_embedding_bag_update)

}  // namespace sparsekit::cuda
