// Updates rows in an optimizer's step, for any type of tables and gradients.
#pragma once

#include "cuda/row_shares.cuh"
#include "cuda/table_access.cuh"
#include "sparsekit/device_memory.h"
#include "sparsekit/update_rows.h"

namespace sparsekit::cuda {

// Returns the row means that a rule needs, or 0s for a negative row. They are the same on
// all lanes of the row's tile. All lanes of the warp must call this function. kWidth depends on the
// alignment of the gradients, but the means must not. So each lane always adds the elements that it
// would read with wide accesses.
template <class Rule, class T, int kWidth, class StepConstants, class Gradient>
SPARSEKIT_DEVICE RowMeans<Acc<T>> mean_of_row(int64_t row, const StepConstants& numbers,
                                              const Gradient& gradient, const RowTable<T>& table,
                                              int dim, int log2_lanes) {
  using A = Acc<T>;
  constexpr int kPiece = kWide<A>;
  constexpr bool kTwo = Rule::kRowMeans > 1;
  int log2_used = 0;
  while (log2_used < log2_lanes && (kPiece << log2_used) < dim) ++log2_used;
  RowMeans<A> sums{0, 0};
  const int lane_in_tile = simt::lane() & ((1 << log2_lanes) - 1);
  if (row >= 0 && lane_in_tile < 1 << log2_used) {
    for (int piece = lane_in_tile * kPiece; piece < dim; piece += kPiece << log2_used) {
      for (int at = piece; at < piece + kPiece && at < dim; at += kWidth) {
        simt::Vec<T, kWidth> w{};
        if constexpr (Rule::kMeansReadWeight)
          w = read<T, kWidth>(table.weight + row * table.stride + at);
        TableSlice<A, kWidth, Rule::kMeansReadStates ? kElementStates<Rule> : 0> states;
        states.read(table, row, at);
        const simt::Vec<T, kWidth> g = gradient(at);
        for (int j = 0; j < kWidth; ++j) {
          A s[kMostStates];
          states.get(j, s);
          const RowMeans<A> one = Rule::of_element(numbers, load(g.at[j]), load(w.at[j]), s);
          sums.first += one.first;
          if constexpr (kTwo) sums.second += one.second;
        }
      }
    }
  }
  // Shuffles do not order memory accesses: all lanes must have read their elements before any lane
  // writes.
  if constexpr (Rule::kMeansReadWeight || Rule::kMeansReadStates) simt::warp_sync();
  for (int apart = 1 << log2_lanes >> 1; apart > 0; apart >>= 1) {
    const int other = simt::lane() ^ apart;
    sums.first += simt::warp_shuffle(sums.first, other);
    if constexpr (kTwo) sums.second += simt::warp_shuffle(sums.second, other);
  }
  if (dim == 0) return sums;
  const A count = static_cast<A>(dim);
  return {sums.first / count, kTwo ? sums.second / count : 0};
}

// Data shared by the threads of a block: a table, its gradients, and the constants of the table's
// step.
template <class T, class Gradients, class StepConstants>
struct Block {
  RowTable<T> table;
  Gradients gradients;
  int64_t tiles;  // number of tiles in all blocks of the table
  StepConstants numbers;
};

// Updates rows. The type Tables has `shares`, the shares of a launch, and `first_blocks`, the first
// block of each share; the last element of first_blocks is the number of blocks in use. For each
// share i, table(i) returns its table, and gradients(i) its gradients. The type of gradients(i) has
//   n                                the number of gradients;
//   find(i)                          returns the location of gradient i; its `row` is -1 if i >= n;
//   read<kWidth>(found, i, dim, at)  returns elements [at, at + kWidth) of gradient i;
//   kOfLookup                        true if row -1 belongs to a key that a lookup has refused and
//                                    reported: such a row is skipped without another report.
template <class Rule, class T, int kWidth, class Tables>
SPARSEKIT_KERNEL __launch_bounds__(kGroupThreads, kGroupBlocksAtOnce)
    update_rows_kernel(SPARSEKIT_GRID_CONSTANT(Tables) tables, Rule rule, StepNumber number,
                       Rounding rounding, int64_t* bad) {
  using A = Acc<T>;
  using Gradients = typename Tables::Gradients;
  using StepConstants = typename Rule::template StepConstants<A>;
  constexpr int kOwn = kElementStates<Rule>;
  const int at_table =
      last_up_to(simt::block(), tables.count, [&](int i) { return tables.first_blocks[i]; });
  const int64_t first_block = tables.first_blocks[at_table];
  const int64_t end = tables.first_blocks[at_table + 1];
  if (simt::block() >= end) return;
  const Share& share = tables.shares[at_table];
  const int64_t t = number.get(simt::global(tables.table(at_table).step));
  if (t < 1) return;
  const int columns = share.columns, log2_lanes = share.log2_lanes, table_number = share.table;
  const int block = static_cast<int>(simt::block() - first_block);
  // Keep this data in shared memory and read it again for each row, since keeping it would take too
  // many registers.
  auto& own = *simt::shared<Block<T, Gradients, StepConstants>>();
  if (simt::thread() == 0) {
    own.table = tables.table(at_table).table;
    own.gradients = tables.gradients(at_table);
    own.tiles = (end - first_block) / columns * kGroupThreads >> log2_lanes;
    own.numbers = rule.template at<A>(t);
  }
  simt::barrier();
  StepConstants numbers = own.numbers;

  const int64_t thread = int64_t{block / columns} * kGroupThreads + simt::thread();
  const int lane_in_tile = simt::lane() & ((1 << log2_lanes) - 1);
  const int leader = simt::lane() - lane_in_tile;
  const int column = ((block % columns << log2_lanes) + lane_in_tile) * kWidth;
  const int stride = columns * kWidth << log2_lanes;
  const int tile_in_warp = simt::lane() >> log2_lanes;
  const int64_t first = (thread >> log2_lanes) - tile_in_warp;
  // Read each row index one step ahead, so that loads of rows do not wait for it.
  auto next = own.gradients.find(first + tile_in_warp);
  // The lanes of a warp stay together, since they communicate.
  for (int64_t of_warp = first; of_warp < own.gradients.n; of_warp += own.tiles) {
    simt::free_registers();
    const int64_t i = of_warp + tile_in_warp;
    const auto found = next;
    int64_t row = found.row;
    next = own.gradients.find(i + own.tiles);
    if (i < own.gradients.n && (row < 0 || row >= own.table.num_rows)) {
      const bool reported = Gradients::kOfLookup && row == -1;
      if (column == 0 && !reported) simt::atomic_min(bad, position_of_table(table_number, i));
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
    const auto gradient = [&](int at) {
      return own.gradients.template read<kWidth>(found, i, dim, at);
    };
    A of_row = 0;
    if constexpr (Rule::kRowMeans > 0) {
      const RowMeans<A> means =
          mean_of_row<Rule, T, kWidth>(row, numbers, gradient, own.table, dim, log2_lanes);
      if constexpr (Rule::kRowWise) {
        if (column == 0 && row >= 0) {
          A* state = simt::global(own.table.states[kOwn] + row * own.table.strides[kOwn]);
          *state = of_row = Rule::of_row(numbers, means, *state);
        }
        of_row = simt::warp_shuffle(of_row, leader);
      } else {
        of_row = Rule::of_row(numbers, means, of_row);
      }
    }
    if (row < 0) continue;
    for (int at = column; at < dim; at += stride) {
      simt::free_registers();
      T* weight_at = own.table.weight + row * own.table.stride + at;
      auto w = read<T, kWidth>(weight_at);
      TableSlice<A, kWidth, kOwn> states;
      states.read(own.table, row, at);
      // Read the gradient last: if it is summed here, the sum has to wait for its terms.
      const simt::Vec<T, kWidth> g = gradient(at);
      Philox4x32 random{};
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (rounding.stochastic) random = rounding_bits(rounding.seed, t, row, at / 8);
      }
      for (int j = 0; j < kWidth; ++j) {
        A weight = load(w.at[j]), s[kMostStates];
        states.get(j, s);
        if constexpr (Rule::kRowMeans > 0) s[kOwn] = of_row;
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

// Returns the shape of a table's rows in a step. Accesses to states have full width; accesses to
// BFloat16 weights have half as many bytes.
template <class Rule, class T>
RowShape shape_of_step(const RowTable<T>& table, const T* grad, bool per_row) {
  RowShape shape = shape_of(table, kElementStates<Rule>, grad);
  // If a state has one number per row, a single tile must update the whole row.
  if (Rule::kRowMeans > 0 || per_row) shape.columns = 1;
  return shape;
}

}  // namespace sparsekit::cuda
