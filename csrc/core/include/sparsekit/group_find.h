// Looks up keys in many tables at once, and inserts new keys.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/hash_table.h"
#include "sparsekit/init_rows.h"

namespace sparsekit {

// One table of a lookup. If `buckets` is null, key k has the row k / world_size, rounded down.
struct GroupTable : AskedTable {
  Bucket* buckets;
  int64_t num_buckets;
  int64_t hash_seed;
  const int64_t* device_hash_seed;  // replaces hash_seed on a device
  int64_t* size;
  int64_t capacity, world_size;
  // A larger table that has the same seed and is about to replace this one, so that new keys are
  // inserted into both. Null if there is none.
  Bucket* larger;
  int64_t num_larger;
};

// Memory for the initial vectors of a table's new rows, and the settings for computing them.
struct NewRows {
  void* weight;  // [capacity, dim]; row r begins at element r * stride
  int64_t dim, stride;
  Initializer initializer;
  const int64_t* device_seed;  // replaces the initializer's seed on a device
};

namespace cpu {

// Sets rows[e] to the row of entry e's key, or to -1 if the key is absent. workspace [num_features
// + 1] is scratch memory.
void group_find(const GroupTable* tables, const Source* sources, const Feature* features,
                int64_t num_features, int32_t* rows, int64_t* workspace,
                const ParallelFor& parallel_for);

// Returns the size in bytes of the workspace for group_find_or_insert. The workspace must be
// 64-byte aligned. Pass the same buffer `order` [tables] to both functions.
int64_t group_find_or_insert_workspace_bytes(const GroupTable* tables, int64_t num_tables,
                                             int32_t* order, const ParallelFor& parallel_for);

// For each table t: finds the distinct keys in order of first occurrence, like unique(); finds or
// inserts their rows, like hash_table_find_or_insert; and writes the initial vectors of new rows,
// like init_rows. rows[first_entry + j] is the row of distinct key j, for j < counts[t]. inverse[e]
// is the index j of entry e's key. `seed` is passed to unique(). refused[t] is the result of
// hash_table_find_or_insert; if it is not 0, the table is unchanged. Preconditions: check_bags and
// check_keys report no error, and for each table n < 2^31 and *size <= kSlotsPerBucket *
// num_buckets.
template <class T>
void group_find_or_insert(const GroupTable* tables, int64_t num_tables, const NewRows* new_rows,
                          const Source* sources, const Feature* features, int64_t seed,
                          int32_t* rows, int32_t* inverse, int64_t* counts, int64_t* refused,
                          int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

// On a device, each launch handles all tables.
namespace cuda {

// Returns the size in bytes of the workspace. Pass the workspace to begin_group first.
int64_t group_find_workspace_bytes(const GroupCall& call);

// Like the CPU version, but rows[e] is -1 if the key is out of range.
void group_find(const GroupCall& call, const GroupBags& bags, int32_t* rows,
                const ErrorReport& errors, void* workspace, void* stream);

// Number of status words per table.
constexpr int64_t kStatusWords = 3;

// Like the CPU version. status [tables, kStatusWords] receives three words for each table. The
// first two are those that hash_table_find_or_insert writes, but they count distinct keys instead
// of entries. The third is the number of rows in use after the call. All three are 0 for a table
// without buckets. If `refused` is not null, it receives the smallest position_of_table(t, new
// keys) of a full table; for a damaged table, 0 is used instead of the number of new keys.
template <class T>
void group_find_or_insert(const GroupCall& call, const GroupBags& bags, int64_t seed, int32_t* rows,
                          int32_t* inverse, int64_t* counts, int64_t* status, int64_t* refused,
                          const ErrorReport& errors, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
