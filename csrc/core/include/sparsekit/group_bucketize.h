// Groups the distinct keys of many tables by the rank that owns them, and locates the vectors of
// these keys among the vectors that the ranks send back.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/owner.h"

namespace sparsekit {

// A table of a call, with the owners of its keys.
struct RoutedTable : AskedTable {
  Owners owners;
};

// Output of group_bucketize.
struct RoutedKeys {
  int64_t* keys;     // [entries] keys for rank 0, table by table; then keys for rank 1; and so on
  int64_t* counts;   // [world_size, tables] number of keys for each rank, by table
  int64_t* numbers;  // [tables] total number of keys from each table
  int32_t* inverse;  // [entries] index of each entry's key among its table's keys
  // [entries] A table's part begins at the table's first entry. Element j of the part is the
  // position of the table's key j in sending order: the table's keys for rank 0, then for rank 1,
  // and so on.
  int32_t* places;
};

// Locates the vectors of a table that one rank has sent. They lie in a buffer that is addressed in
// rows of any size. `end` is the number of the table's keys for this rank and all lower ranks. The
// vector of the j-th key in sending order begins at row `begin` + (j - `end` of the previous
// rank) * step.
struct ComeVectors {
  int64_t begin, end;
};

namespace cpu {

// Returns the workspace size in bytes of group_bucketize; the workspace must be 64-byte aligned.
// Pass the same `order` [tables] to both functions.
int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for);

// Groups the distinct keys, or all keys if `distinct` is false. The keys of each table for each
// rank are in order of first occurrence. `seed` is that of unique(). Returns -1, or the index of a
// table with a key whose owner in the map is not a rank; such keys are grouped with the keys of
// rank 0.
int64_t group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                        const Feature* features, int64_t world_size, bool distinct, int64_t seed,
                        const RoutedKeys& to, int32_t* order, void* workspace,
                        const ParallelFor& parallel_for);

// Sets rows[first_entry + j] to the row at which the vector of the table's key j begins. come
// [tables, world_size] locates the received vectors; steps [tables] is the number of rows per
// vector.
void exchange_rows(const RoutedTable* tables, int64_t num_tables, int64_t world_size,
                   const ComeVectors* come, const int64_t* steps, const int32_t* places,
                   int32_t* rows, const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU versions, for the tables call.routed. The host never waits for the device.
namespace cuda {

// Returns the workspace size in bytes. The same workspace must be passed to begin_group first.
int64_t group_bucketize_workspace_bytes(const GroupCall& call, int64_t world_size, bool distinct);

// Precondition: world_size * num_tables < 2^31. *bad_owners becomes the smallest index of a table
// with a key whose owner in the map is not a rank.
void group_bucketize(const GroupCall& call, const GroupBags& bags, int64_t world_size,
                     bool distinct, int64_t seed, const RoutedKeys& to, int64_t* bad_owners,
                     void* workspace, void* stream);

// Arguments of exchange_rows; the arrays are in host memory except where noted.
struct ExchangeCall {
  int64_t num_tables, world_size, entries;
  const int64_t* first_bags;  // [num_tables + 1] index of each table's first bag among all bags
  const ComeVectors* come;
  const int64_t* steps;
  const int32_t* bags;    // in device memory
  const int32_t* places;  // in device memory, [entries]
};

// The smallest position of an invalid element of `places`, and the smallest index of an invalid
// table: its bags decrease or exceed `entries`, or vectors were received for more keys than it has
// entries.
struct ExchangeErrors {
  int64_t* bad_place;
  int64_t* bad_table;
};

int64_t exchange_rows_workspace_bytes(const ExchangeCall& call);

// A key with an invalid place gets the row -1. The rows of an invalid table are unspecified.
void exchange_rows(const ExchangeCall& call, int32_t* rows, const ExchangeErrors& errors,
                   void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
