// Drops the rows with the lowest scores from many tables, in host memory.
#pragma once

#include <cstdint>

#include "sparsekit/lowest_rows.h"
#include "sparsekit/move_rows.h"

namespace sparsekit {

// Row numbers kept outside a table, such as the rows that a lookup has found.
struct RowList {
  int32_t* rows;  // [n]
  int64_t n;
  int64_t* lost;  // becomes 1 if one of the rows is dropped, otherwise 0
};

struct DroppingTable {
  Bucket* buckets;  // [num_buckets]
  int64_t num_buckets, hash_seed;
  ScorePolicy policy;
  int64_t halve_every, now;
  int64_t* size;
  int64_t count;               // number of rows to drop
  const MovedTensor* tensors;  // [num_tensors] tensors with a row per row; the first is the scores
  int64_t num_tensors;
  const RowList* lists;  // [num_lists] the first num_pinned have the rows that must stay
  int64_t num_lists, num_pinned;

  const int64_t* scores() const { return reinterpret_cast<const int64_t*>(tensors->data); }
};

namespace cpu {

// Returns the size in bytes of the workspace for group_drop_lowest. Pass the same buffer `order`
// [num_tables] to both functions.
int64_t group_drop_lowest_workspace_bytes(const DroppingTable* tables, int64_t num_tables,
                                          int32_t* order, const ParallelFor& parallel_for);

// Drops from each table the `count` rows with the lowest scores, or all unpinned rows if there are
// fewer. Finds the same rows as lowest_rows(), removes their keys, and then has the same effect as
// compact_rows(), hash_table_renumber() and move_rows(). dropped[t] becomes the number of rows
// dropped from table t. In the lists, row numbers are replaced by the new numbers, or by -1 for
// dropped rows; numbers outside [0, *size) are kept.
void group_drop_lowest(const DroppingTable* tables, int64_t num_tables, int64_t* dropped,
                       int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu
}  // namespace sparsekit
