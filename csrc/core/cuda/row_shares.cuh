// Divides the blocks of a launch among the tables whose rows it updates.
#pragma once

#include "cuda/descriptors.cuh"
#include "cuda/row_shape.h"

namespace sparsekit::cuda {

// The share of one table in a launch. `columns` consecutive blocks handle the same rows; see
// row_shape.h.
struct Share {
  int32_t table;  // index of the table in the call
  uint16_t columns;
  uint16_t log2_lanes;

  Share() = default;
  Share(int64_t table, const RowShape& shape)
      : table(static_cast<int32_t>(table)),
        columns(static_cast<uint16_t>(shape.columns)),
        log2_lanes(static_cast<uint16_t>(shape.log2_lanes)) {}

  // Returns the number of threads for n rows, with one tile per row and column.
  SPARSEKIT_HOST_DEVICE int64_t threads(int64_t n) const { return (n << log2_lanes) * columns; }
};

// Maximum number of blocks in a launch, not counting one for each table and column. It exceeds the
// number of blocks that any device runs at a time. With this limit, each block has enough rows to
// amortize the two powers that it computes per step. The host runner uses fewer blocks, so that
// small tests loop, too.
#ifdef __CUDACC__
constexpr int64_t kMostUpdateBlocks = 2048;
#else
constexpr int64_t kMostUpdateBlocks = 32;
#endif

// Divides the blocks of a launch among its tables, in proportion to the threads that their rows
// need.
struct BlockShares {
  int64_t of_block;  // number of threads handled by one block

  SPARSEKIT_HOST_DEVICE explicit BlockShares(int64_t all_threads)
      : of_block((all_threads + kMostUpdateBlocks - 1) / kMostUpdateBlocks) {
    if (of_block < kGroupThreads) of_block = kGroupThreads;
  }
  // Returns the number of blocks for n rows.
  SPARSEKIT_HOST_DEVICE int64_t blocks(const Share& share, int64_t n) const {
    return ((n << share.log2_lanes) + of_block - 1) / of_block * share.columns;
  }
};

// The tables of a launch whose row counts are known only on the device. Both arrays are in device
// memory.
struct DeviceShares {
  const Share* shares;
  int64_t* first_blocks;  // [count + 1] number of blocks of all preceding tables
  int32_t count;
};

// The launches of an update: one for the tables with wide accesses, one for the other tables.
struct UpdateShares {
  DeviceShares wide, narrow;
};

// Computes launch.first_blocks in a single block of threads. rows(t) is table t's row count.
template <class Rows>
SPARSEKIT_DEVICE void share_out_blocks(const DeviceShares& launch, const Rows& rows) {
  if (launch.count == 0) return;
  int64_t* firsts = launch.first_blocks;
  const auto put = [&](int i, int64_t before) { firsts[i] = before; };
  const auto threads = [&](int i) {
    const Share& share = launch.shares[i];
    return share.threads(rows(share.table));
  };
  sum_up(launch.count, threads, put);
  simt::barrier();
  const BlockShares all(firsts[launch.count]);
  const auto blocks = [&](int i) {
    const Share& share = launch.shares[i];
    return all.blocks(share, rows(share.table));
  };
  sum_up(launch.count, blocks, put);
}

}  // namespace sparsekit::cuda
