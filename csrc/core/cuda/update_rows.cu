#include "sparsekit/update_rows.h"

#include <algorithm>

#include "cuda/table_access.cuh"
#include "sparsekit/device_memory.h"

namespace sparsekit::cuda {
namespace {

constexpr int kThreads = 256;
// On a multiprocessor, at least. With it ptxas takes a few registers more where it would spill.
constexpr int kBlocksAtOnce = 2;
// More than any device runs at a time; each block then has rows enough to be worth its two powers.
constexpr int64_t kMaxBlocks = 2048;

// Mean of squares of a row, the same on all lanes of its tile. All lanes of the warp call it.
template <class T, int kWidth>
SPARSEKIT_DEVICE Acc<T> mean_square(const T* row, int64_t dim, int log2_lanes) {
  Acc<T> sum = 0;
  if (row != nullptr) {
    for (int64_t at = first_element(kWidth, log2_lanes); at < dim; at += kWidth << log2_lanes) {
      const auto g = read<T, kWidth>(row + at);
      for (int j = 0; j < kWidth; ++j) sum += load(g.at[j]) * load(g.at[j]);
    }
  }
  for (int apart = 1 << log2_lanes >> 1; apart > 0; apart >>= 1) {
    sum += simt::warp_shuffle(sum, simt::lane() ^ apart);
  }
  return dim == 0 ? sum : sum / static_cast<Acc<T>>(dim);
}

// What one table of a launch has to do: its blocks are those from first_block on to that of the
// next one. They are `columns` times as many as its grid has rows of blocks; see row_shape.h.
template <class T>
struct Share {
  RowGradients<T> gradients;
  int32_t first_block;
  int32_t table;  // its position in the call
  uint16_t columns;
  uint16_t log2_lanes;
};

// The tables of a launch, as its parameter: up to kTablesOfLaunch with all that belongs to them, in
// the 4 KB that every driver takes, ...
template <class T>
struct FewTables {
  static constexpr int kMost = kTablesOfLaunch;
  int32_t count;
  Share<T> shares[kMost];
  SteppedTable<T> tables[kMost];

  SPARSEKIT_DEVICE const SteppedTable<T>& table(int i) const { return tables[i]; }
  void put(int i, const SteppedTable<T>& table) { tables[i] = table; }
};

// ... or with what is new in a call only, in 32 KB.
template <class T>
struct ManyTables {
  static constexpr int kMost = 768;
  int32_t count;
  Share<T> shares[kMost];
  const SteppedTable<T>* tables;

  SPARSEKIT_DEVICE const SteppedTable<T>& table(int i) const { return tables[shares[i].table]; }
  void put(int, const SteppedTable<T>&) {}
};

// Which of the tables has a block.
template <class Tables>
SPARSEKIT_DEVICE int table_of_block(const Tables& tables, int64_t block) {
  int first = 0, count = tables.count;
  while (count > 1) {
    const int half = count / 2;
    if (tables.shares[first + half].first_block <= block) first += half;
    count -= half;
  }
  return first;
}

// A table's gradients, as far as the device knows them.
template <class T>
SPARSEKIT_DEVICE RowGradients<T> bounded(RowGradients<T> gradients, const GradientBounds& bounds,
                                         int table) {
  const int64_t* counts = bounds.counts;
  gradients.n = DeviceCount{gradients.n, counts == nullptr ? nullptr : counts + table}.get();
  if (bounds.first_row == nullptr) return gradients;
  const int64_t first = bounds.first_row[table], count = bounds.first_row[table + 1] - first;
  return {gradients.rows + first, gradients.grad + bounds.first_element[table],
          gradients.n < count ? gradients.n : count};
}

// What the threads of a block share: their table, its part in the call, and the numbers of its
// step.
template <class T, class Numbers>
struct Block {
  RowTable<T> table;
  RowGradients<T> gradients;
  int64_t tiles;  // of all blocks of the table
  Numbers numbers;
};

template <class Rule, class T, int kWidth, class Tables>
SPARSEKIT_KERNEL __launch_bounds__(kThreads, kBlocksAtOnce)
    update_rows_kernel(SPARSEKIT_GRID_CONSTANT(Tables) tables, GradientBounds bounds, Rule rule,
                       StepNumber number, Rounding rounding, int64_t* bad) {
  using A = Acc<T>;
  using Numbers = typename Rule::template Numbers<A>;
  const int at_table = table_of_block(tables, simt::block());
  const Share<T>& share = tables.shares[at_table];
  const int64_t t = number.get(simt::global(tables.table(at_table).step));
  if (t < 1) return;
  const int columns = share.columns, log2_lanes = share.log2_lanes, table_number = share.table;
  const int block = static_cast<int>(simt::block()) - share.first_block;
  // In shared memory, and read again for each row: it would take too many registers.
  auto& own = *simt::shared<Block<T, Numbers>>();
  if (simt::thread() == 0) {
    const bool is_last = at_table + 1 == tables.count;
    const int64_t end = is_last ? simt::blocks() : tables.shares[at_table + 1].first_block;
    own.table = tables.table(at_table).table;
    own.gradients = bounded(share.gradients, bounds, share.table);
    own.tiles = (end - share.first_block) / columns * kThreads >> log2_lanes;
    own.numbers = rule.template at<A>(t);
  }
  simt::barrier();
  Numbers numbers = own.numbers;

  const int64_t thread = int64_t{block / columns} * kThreads + simt::thread();
  const int lane_in_tile = simt::lane() & ((1 << log2_lanes) - 1);
  const int leader = simt::lane() - lane_in_tile;
  const int column = ((block % columns << log2_lanes) + lane_in_tile) * kWidth;
  const int stride = columns * kWidth << log2_lanes;
  const int tile_in_warp = simt::lane() >> log2_lanes;
  const auto row_at = [&own](int64_t i) {
    const int64_t* rows = own.gradients.rows;
    return i >= own.gradients.n ? -1 : rows == nullptr ? i : *simt::global(rows + i);
  };
  const int64_t first = (thread >> log2_lanes) - tile_in_warp;
  // One ahead, so that no row has to wait for its number first.
  int64_t next_row = row_at(first + tile_in_warp);
  // The lanes of a warp stay together, for what they tell each other.
  for (int64_t of_warp = first; of_warp < own.gradients.n; of_warp += own.tiles) {
    simt::free_registers();
    const int64_t i = of_warp + tile_in_warp;
    int64_t row = next_row;
    next_row = row_at(i + own.tiles);
    if (i < own.gradients.n && (row < 0 || row >= own.table.num_rows)) {
      if (column == 0) simt::atomic_min(bad, position_of_table(table_number, i));
      row = -1;
    }
    if (own.table.row_step != nullptr) {
      int32_t steps = 1;
      if (column == 0 && row >= 0) {
        int32_t* of_row = simt::global(own.table.row_step + row);
        *of_row = steps = row_step_of(number.per_row ? int64_t{*of_row} + 1 : t);
      }
      if constexpr (Rule::kPerRow) {
        if (number.per_row) numbers = rule.template at<A>(simt::warp_shuffle(steps, leader));
      }
    }
    const int dim = static_cast<int>(own.table.dim);
    A of_row = 0;
    if constexpr (Rule::kRowWise) {
      const T* grad = row < 0 ? nullptr : own.gradients.grad + i * dim;
      const A mean = mean_square<T, kWidth>(grad, dim, log2_lanes);
      if (column == 0 && row >= 0) {
        A* state = simt::global(own.table.states[0] + row * own.table.strides[0]);
        *state = of_row = Rule::accumulate(*state, mean);
      }
      of_row = simt::warp_shuffle(of_row, leader);
    }
    if (row < 0) continue;
    for (int at = column; at < dim; at += stride) {
      simt::free_registers();
      const auto g = read<T, kWidth>(own.gradients.grad + i * dim + at);
      T* weight_at = own.table.weight + row * dim + at;
      auto w = read<T, kWidth>(weight_at);
      TableSlice<A, kWidth, Rule::kRowWise ? 0 : Rule::kStates> states;
      states.read(own.table, row, at);
      Philox4x32 random{};
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (rounding.stochastic) random = rounding_bits(rounding.seed, t, row, at / 8);
      }
      for (int j = 0; j < kWidth; ++j) {
        A weight = load(w.at[j]), s[kMostStates];
        if constexpr (Rule::kRowWise) s[0] = of_row;
        states.get(j, s);
        Rule::step(numbers, load(g.at[j]), weight, s);
        states.set(j, s);
        w.at[j] = store<T>(weight);
        if constexpr (std::is_same_v<T, BFloat16>) {
          if (rounding.stochastic) {
            w.at[j] = store_at_random(weight, bits_of_column(random, at + j));
          }
        }
      }
      states.write(own.table, row, at);
      write(weight_at, w);
    }
  }
}

// The steps of a launch, in the 4 KB that every driver takes.
struct Steps {
  static constexpr int kMost = 500;
  int64_t* steps[kMost];
};

SPARSEKIT_KERNEL count_steps_kernel(SPARSEKIT_GRID_CONSTANT(Steps) steps, int count) {
  const int64_t i = simt::global_thread();
  if (i >= count) return;
  const int64_t step = *steps.steps[i];
  if (step >= 0) *steps.steps[i] = step + 1;
}

// A call, cut into launches.
template <class Rule, class T>
struct Call {
  const SteppedTable<T>* tables;
  const SteppedTable<T>* on_device;
  const RowGradients<T>* gradients;
  int64_t num_tables;
  const GradientBounds& bounds;
  const Rule& rule;
  StepNumber number;
  Rounding rounding;
  int64_t* bad;
  void* stream;

  // The states fill their accesses; BFloat16 weights beside them have half as many bytes.
  RowShape shape(int64_t i) const {
    RowShape shape =
        shape_of(tables[i].table, Rule::kRowWise ? 0 : Rule::kStates, gradients[i].grad);
    // What is one for a row must be done by one tile.
    if (Rule::kRowWise || number.per_row) shape.columns = 1;
    return shape;
  }

  // Launches for the tables whose lanes move kWidth elements in one access.
  template <int kWidth, class Tables>
  void launch_all() const {
    Tables launch;
    launch.count = 0;
    if constexpr (std::is_same_v<Tables, ManyTables<T>>) launch.tables = on_device;
    for (int64_t i = 0; i < num_tables; ++i) {
      const RowShape of = shape(i);
      if (gradients[i].n <= 0 || of.width != kWidth) continue;
      launch.put(launch.count, tables[i]);
      launch.shares[launch.count++] = {gradients[i], 0, static_cast<int32_t>(i),
                                       static_cast<uint16_t>(of.columns),
                                       static_cast<uint16_t>(of.log2_lanes)};
      if (launch.count == Tables::kMost) launch_some<kWidth>(launch);
    }
    launch_some<kWidth>(launch);
  }

  template <int kWidth, class Tables>
  void launch_some(Tables& launch) const {
    if (launch.count == 0) return;
    // Where there is more to do than kMaxBlocks can do at a time, a table gets as many of them as
    // its rows are of all.
    const auto wanted = [&](int i) {
      const Share<T>& share = launch.shares[i];
      return simt::grid_for(share.gradients.n << share.log2_lanes, kThreads).blocks;
    };
    double all = 0;
    for (int i = 0; i < launch.count; ++i) {
      all += static_cast<double>(wanted(i)) * launch.shares[i].columns;
    }
    const double part = std::min(1.0, kMaxBlocks / all);
    int64_t blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.shares[i].first_block = static_cast<int32_t>(blocks);
      const auto own = static_cast<int64_t>(static_cast<double>(wanted(i)) * part);
      blocks += std::max<int64_t>(own, 1) * launch.shares[i].columns;
    }
    simt::Grid grid{blocks, kThreads};
    grid.shared_bytes = sizeof(Block<T, typename Rule::template Numbers<Acc<T>>>);
    simt::launch("update_rows", update_rows_kernel<Rule, T, kWidth, Tables>, grid, stream, launch,
                 bounds, rule, number, rounding, bad);
    launch.count = 0;
  }
};

}  // namespace

template <class Rule, class T>
void update_rows(const SteppedTable<T>* tables, const SteppedTable<T>* on_device,
                 const RowGradients<T>* gradients, int64_t num_tables, const GradientBounds& bounds,
                 const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                 void* stream) {
  const Call<Rule, T> call{tables, on_device, gradients, num_tables, bounds,
                           rule,   number,    rounding,  bad,        stream};
  constexpr int kWidest = kWide<Acc<T>>;
  if (num_tables <= kTablesOfLaunch) {
    call.template launch_all<kWidest, FewTables<T>>();
    call.template launch_all<1, FewTables<T>>();
  } else {
    call.template launch_all<kWidest, ManyTables<T>>();
    call.template launch_all<1, ManyTables<T>>();
  }
}

void count_steps(int64_t* const* steps, int64_t count, void* stream) {
  for (int64_t first = 0; first < count; first += Steps::kMost) {
    Steps launch;
    const auto own = static_cast<int>(std::min<int64_t>(count - first, Steps::kMost));
    std::copy_n(steps + first, own, launch.steps);
    simt::launch("count_steps", count_steps_kernel, simt::grid_for(own), stream, launch, own);
  }
}

#define SPARSEKIT_INSTANTIATE(Rule, T)                                                           \
  template void update_rows(const SteppedTable<T>*, const SteppedTable<T>*,                      \
                            const RowGradients<T>*, int64_t, const GradientBounds&, const Rule&, \
                            StepNumber, Rounding, int64_t*, void*);
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, float)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, double)
SPARSEKIT_FOR_EACH_RULE(SPARSEKIT_INSTANTIATE, BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
