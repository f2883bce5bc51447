#include "cuda/update_rows.cuh"

namespace sparsekit::cuda {
namespace {

// Gradients in memory. n is the exact number of gradients, which may be known only on the device.
template <class T>
struct GivenGradients {
  static constexpr bool kOfLookup = false;

  struct Found {
    int64_t row;
  };
  RowGradients<T> given;
  int64_t n;

  SPARSEKIT_DEVICE Found find(int64_t i) const {
    if (i >= n) return {-1};
    return {given.rows == nullptr ? i : *simt::global(given.rows + i)};
  }
  template <int kWidth>
  SPARSEKIT_DEVICE simt::Vec<T, kWidth> read(Found, int64_t i, int dim, int at) const {
    return cuda::read<T, kWidth>(given.grad + i * dim + at);
  }
};

// The tables of a launch and their gradients.
template <class T, int kTables>
struct GivenTables {
  static constexpr int kMost = kTables;
  using Gradients = GivenGradients<T>;

  int32_t count;
  Share shares[kMost];
  int32_t first_blocks[kMost + 1];
  RowGradients<T> given[kMost];
  const int64_t* counts;  // number of gradients for each table in the call; may be null

  SPARSEKIT_DEVICE Gradients gradients(int i) const {
    const int64_t* exact = counts == nullptr ? nullptr : counts + shares[i].table;
    return {given[i], DeviceCount{given[i].n, exact}.get()};
  }
};

// The parameter of a launch for up to kTablesOfLaunch tables. It holds all data of these tables in
// 4 KB, a size that every driver supports.
template <class T>
struct FewTables : GivenTables<T, kTablesOfLaunch> {
  SteppedTable<T> tables[kTablesOfLaunch];

  SPARSEKIT_DEVICE const SteppedTable<T>& table(int i) const { return tables[i]; }
  void put(int i, const SteppedTable<T>& table) { tables[i] = table; }
};

// The parameter of a launch for more tables. Its 32 KB hold only the data that differs from call to
// call.
template <class T>
struct ManyTables : GivenTables<T, 768> {
  const SteppedTable<T>* tables;

  SPARSEKIT_DEVICE const SteppedTable<T>& table(int i) const {
    return tables[this->shares[i].table];
  }
  void put(int, const SteppedTable<T>&) {}
};

// Step counters of a launch, in a parameter of 4 KB, a size that every driver supports.
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

// A call of update_rows. It is split into launches.
template <class Rule, class T>
struct Call {
  const SteppedTable<T>* tables;
  const SteppedTable<T>* on_device;
  const RowGradients<T>* gradients;
  int64_t num_tables;
  const int64_t* counts;
  const Rule& rule;
  StepNumber number;
  Rounding rounding;
  int64_t* bad;
  void* stream;

  // Launches the kernels for the tables whose lanes access kWidth elements at once.
  template <int kWidth, class Tables>
  void launch_all() const {
    Tables launch;
    launch.count = 0;
    launch.counts = counts;
    if constexpr (std::is_same_v<Tables, ManyTables<T>>) launch.tables = on_device;
    for (int64_t i = 0; i < num_tables; ++i) {
      const RowShape shape =
          shape_of_step<Rule>(tables[i].table, gradients[i].grad, number.per_row);
      if (gradients[i].n <= 0 || shape.width != kWidth) continue;
      launch.put(launch.count, tables[i]);
      launch.given[launch.count] = gradients[i];
      launch.shares[launch.count++] = Share(i, shape);
      if (launch.count == Tables::kMost) launch_some<kWidth>(launch);
    }
    launch_some<kWidth>(launch);
  }

  template <int kWidth, class Tables>
  void launch_some(Tables& launch) const {
    if (launch.count == 0) return;
    int64_t threads = 0;
    for (int i = 0; i < launch.count; ++i) threads += launch.shares[i].threads(launch.given[i].n);
    const BlockShares shares(threads);
    int64_t blocks = 0;
    for (int i = 0; i < launch.count; ++i) {
      launch.first_blocks[i] = static_cast<int32_t>(blocks);
      blocks += shares.blocks(launch.shares[i], launch.given[i].n);
    }
    launch.first_blocks[launch.count] = static_cast<int32_t>(blocks);
    simt::Grid grid{blocks, kGroupThreads};
    using StepConstants = typename Rule::template StepConstants<Acc<T>>;
    grid.shared_bytes = sizeof(Block<T, GivenGradients<T>, StepConstants>);
    simt::launch("update_rows", update_rows_kernel<Rule, T, kWidth, Tables>, grid, stream, launch,
                 rule, number, rounding, bad);
    launch.count = 0;
  }
};

}  // namespace

template <class Rule, class T>
void update_rows(const SteppedTable<T>* tables, const SteppedTable<T>* on_device,
                 const RowGradients<T>* gradients, int64_t num_tables, const int64_t* counts,
                 const Rule& rule, StepNumber number, Rounding rounding, int64_t* bad,
                 void* stream) {
  const Call<Rule, T> call{tables, on_device, gradients, num_tables, counts,
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

SPARSEKIT_INSTANTIATE_RULES(update_rows)

}  // namespace sparsekit::cuda
