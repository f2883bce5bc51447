// Finds a table's rows with the lowest scores, which are dropped first when the table is full.
#pragma once

#include <cstdint>

#include "sparsekit/group_touch.h"
#include "sparsekit/hash_table.h"
#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// The rows [0, size) of a table; the lowest `count` are wanted. Rows are compared by order, and
// rows of equal order by the hashes of their keys as unsigned numbers.
struct ScoredRows {
  const int64_t* scores;  // [size]
  int64_t size;
  ScorePolicy policy;  // kLru: the order is the score; kLfu: the order is the aged count
  int64_t halve_every, now;
  const Bucket* buckets;  // [num_buckets] the table's keys
  int64_t num_buckets;
  const int64_t* pinned;  // [num_pinned] rows to leave out; rows outside [0, size) are ignored
  int64_t num_pinned;
  int64_t count;

  SPARSEKIT_HOST_DEVICE LfuClock clock() const { return LfuClock(now, halve_every); }
  // Returns the order of a row. `clock` is clock(), passed in so that a loop creates it only once.
  SPARSEKIT_HOST_DEVICE int64_t order(const LfuClock& clock, int64_t row) const {
    const int64_t score = scores[row];
    return policy == ScorePolicy::kLfu ? static_cast<int64_t>(clock.age(score)) : score;
  }
};

// The rows found, in ascending order of row; each array has min(count, size) elements.
struct LowestRows {
  int64_t* rows;
  int64_t* orders;
  int64_t* keys;
  // On the CPU: [count] keys of the last `count` rows, for count <= size; null if not needed.
  int64_t* last_keys = nullptr;
};

namespace cpu {

int64_t lowest_rows_workspace_bytes(int64_t size);

// Writes the `count` lowest rows that are not pinned, or all such rows if there are fewer, and
// returns how many there are. In a damaged table, a row without a key gets key 0. Precondition:
// size < 2^31.
int64_t lowest_rows(const ScoredRows& table, const LowestRows& found, void* workspace,
                    const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU version, but *num_found becomes the number of rows. All pointers are to device
// memory, and the host does not wait. In a damaged table with repeated keys, the choice among rows
// of equal order may differ from the CPU version's.
namespace cuda {

int64_t lowest_rows_workspace_bytes(int64_t size);

void lowest_rows(const ScoredRows& table, const LowestRows& found, int64_t* num_found,
                 void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
