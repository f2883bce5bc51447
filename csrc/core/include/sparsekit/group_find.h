// Finds rows of the keys of many tables at once, and inserts new keys.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/hash_table.h"
#include "sparsekit/init_rows.h"

namespace sparsekit {

// One table of a lookup. Without buckets, a key's row is the key divided by world_size, rounded
// down.
struct GroupTable : AskedTable {
  Bucket* buckets;
  int64_t num_buckets;
  int64_t hash_seed;
  const int64_t* device_hash_seed;  // replaces hash_seed on a device
  int64_t* size;
  int64_t capacity, world_size;
};

// The destination of the initial vectors of a table's new rows.
struct NewRows {
  void* weight;  // [capacity, dim]
  int64_t dim;
  Initializer initializer;
  const int64_t* device_seed;  // replaces the initializer's seed on a device
};

namespace cpu {

// rows[e] = row of the key of entry e, or -1 if the key is absent. workspace [features + 1].
void group_find(const GroupTable* tables, const Source* sources, const Feature* features,
                int64_t num_features, int32_t* rows, int64_t* workspace,
                const ParallelFor& parallel_for);

// Returns the bytes of workspace, aligned to 64, for group_find_or_insert. Pass the same `order`
// [tables] to both.
int64_t group_find_or_insert_workspace_bytes(const GroupTable* tables, int64_t num_tables,
                                             int32_t* order, const ParallelFor& parallel_for);

// Handles each table separately: finds the distinct keys in order of first occurrence, like
// unique(); their rows, like hash_table_find_or_insert; and writes initial vectors of new rows,
// like init_rows. rows[first_entry + j] is the row of a table's distinct key j < counts[t];
// inverse[e] is the j of entry e. `seed` as in unique(). refused [tables] is the result of
// hash_table_find_or_insert; if it is not 0, the table is unchanged. Preconditions: check_bags and
// check_keys find nothing; n < 2^31 for each table; sizes are at most 5 per bucket.
template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t seed,
                          int32_t* rows, int32_t* inverse, int64_t* counts, int64_t* refused,
                          int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

// On a device, the same launches handle all tables.
namespace cuda {

// Returns the size of the workspace, which must be passed to begin_group first.
int64_t group_find_workspace_bytes(const GroupCall& call);

// rows[e] as on the CPU, but -1 for a key out of range.
void group_find(const GroupCall& call, const GroupBags& bags, int32_t* rows, void* workspace,
                void* stream);

// Like the CPU version. status [tables, 2] is what hash_table_find_or_insert writes, counting
// distinct keys; zeros for a table without buckets.
template <class T>
void group_find_or_insert(const GroupCall& call, const GroupBags& bags, int64_t seed, int32_t* rows,
                          int32_t* inverse, int64_t* counts, int64_t* status, void* workspace,
                          void* stream);

}  // namespace cuda
}  // namespace sparsekit
