// Rows of the keys of many tables at once.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/hash_table.h"
#include "sparsekit/init_rows.h"

namespace sparsekit {

// One table of a lookup. Without buckets a key is its row times world_size, plus
// something less than world_size.
struct GroupTable : AskedTable {
  Bucket* buckets;
  int64_t num_buckets;
  int64_t hash_seed;
  const int64_t* device_hash_seed;  // in its place on a device
  int64_t* size;
  int64_t capacity, world_size;
};

// Output for the vectors of a table's new rows.
struct NewRows {
  void* weight;  // [capacity, dim]
  int64_t dim;
  Initializer initializer;
  const int64_t* device_seed;  // in place of the initializer's on a device
};

namespace cpu {

// rows[e] = row of the key of entry e, -1 if it is absent. workspace [features + 1].
void group_find(const GroupTable* tables, const Source* sources, const Feature* features,
                int64_t num_features, int32_t* rows, int64_t* workspace,
                const ParallelFor& parallel_for);

// Bytes of workspace, aligned to 64, for group_find_or_insert; `order` [tables] is for both of
// them.
int64_t group_find_or_insert_workspace_bytes(const GroupTable* tables, int64_t num_tables,
                                             int32_t* order, const ParallelFor& parallel_for);

// Each table by itself: distinct keys in order of first occurrence, as unique(); their rows, as
// hash_table_find_or_insert; initial vectors of those that are new, as init_rows. rows[first_entry
// + j] is the row of a table's distinct key j, of which there are counts[t]; inverse[e] is the j of
// entry e. `seed` as in unique(). refused [tables] is what hash_table_find_or_insert returns, and
// if that is not 0 the table is as it was. Preconditions: what check_bags and check_keys look for
// is not there; n < 2^31 for each table; sizes are at most 5 for each bucket.
template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t seed,
                          int32_t* rows, int32_t* inverse, int64_t* counts, int64_t* refused,
                          int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

// On a device, all tables in the same launches.
namespace cuda {

// Size of the workspace, which begin_group is given first.
int64_t group_find_workspace_bytes(const GroupCall& call);

// rows[e] as on the CPU; -1 for a key that is out of range.
void group_find(const GroupCall& call, const GroupBags& bags, int32_t* rows, void* workspace,
                void* stream);

// As on the CPU. status [tables, 2] as hash_table_find_or_insert writes it, where distinct keys are
// counted; zeros for a table without buckets.
template <class T>
void group_find_or_insert(const GroupCall& call, const GroupBags& bags, int64_t seed, int32_t* rows,
                          int32_t* inverse, int64_t* counts, int64_t* status, void* workspace,
                          void* stream);

}  // namespace cuda
}  // namespace sparsekit
