// Groups the distinct keys of many tables by the rank that owns them, and locates these keys'
// vectors in the messages that the ranks send back.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/owner.h"

namespace sparsekit {

// One table of a group_bucketize call, with the owners of its keys.
struct RoutedTable : AskedTable {
  Owners owners;
  // If the number of places is fixed (see RoutedKeys): the table's number of places per rank, and
  // the index of its first place among all places for the rank.
  int64_t max_keys = 0, first_place = 0;
};

// Output of group_bucketize.
struct RoutedKeys {
  int64_t* keys;     // [entries] keys for rank 0, table by table; then keys for rank 1; and so on
  int64_t* counts;   // [world_size, tables] number of keys for each rank, by table
  int64_t* numbers;  // [tables] total number of keys from each table
  int32_t* inverse;  // [entries] index of each entry's key among its table's keys
  // [entries] Each table has a range that begins at the table's first entry. Element j of the range
  // is the position of the table's key j in sending order: the table's keys for rank 0, then for
  // rank 1, and so on.
  int32_t* places;
  // If positive, each table has a fixed number of places per rank: `keys` is [world_size,
  // rank_places], a table's keys begin at its first_place, its unused places up to max_keys are
  // undefined, and `places` counts max_keys for each lower rank. Keys beyond max_keys are not
  // written.
  int64_t rank_places = 0;
};

// Errors in the input of group_bucketize; each is the index of a table, or -1.
struct RouteErrors {
  int64_t bad_owners;     // the map assigns a key of this table to an invalid rank
  int64_t too_many_keys;  // a rank owns more than max_keys of this table's keys
};

// Locates the vectors that one rank sent for a table, in rows of the receive buffer. `end` is the
// number of the table's keys for this rank and all lower ranks. The vector of key j, counted in
// sending order, begins at row `begin` + (j - `end` of the previous rank) * step.
struct ComeVectors {
  int64_t begin, end;
};

namespace cpu {

// Returns the size in bytes of the workspace for group_bucketize. The workspace must be 64-byte
// aligned. Pass the same buffer `order` [tables] to both functions.
int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for);

// Groups the distinct keys, or all keys if `distinct` is false. A table's keys for a rank are in
// order of first occurrence. `seed` is passed to unique(). Keys that the map assigns to an invalid
// rank are grouped with the keys of rank 0.
RouteErrors group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                            const Feature* features, int64_t world_size, bool distinct,
                            int64_t seed, const RoutedKeys& to, int32_t* order, void* workspace,
                            const ParallelFor& parallel_for);

// Sets rows[first_entry + j] to the row of the receive buffer where the vector of the table's key j
// begins. numbers [tables] is the number of keys of each table. come [tables, world_size] locates
// the received vectors. steps [tables] is the number of rows per vector.
void exchange_rows(const RoutedTable* tables, int64_t num_tables, const int64_t* numbers,
                   int64_t world_size, const ComeVectors* come, const int64_t* steps,
                   const int32_t* places, int32_t* rows, const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU versions; the tables are in call.routed. The host does not wait for the device.
namespace cuda {

// Returns the size in bytes of the workspace. Pass the workspace to begin_group first.
int64_t group_bucketize_workspace_bytes(const GroupCall& call, int64_t world_size, bool distinct);

// The fields of RouteErrors, in device memory. Each becomes the smallest index of a bad table.
struct RouteErrorWords {
  int64_t* bad_owners;
  int64_t* too_many_keys;
};

// Groups keys. Precondition: world_size * num_tables < 2^31.
void group_bucketize(const GroupCall& call, const GroupBags& bags, int64_t world_size,
                     bool distinct, int64_t seed, const RoutedKeys& to,
                     const RouteErrorWords& errors, void* workspace, void* stream);

// Arguments of exchange_rows. The arrays are in host memory except where noted.
struct ExchangeCall {
  int64_t num_tables, world_size, entries;
  const int64_t* first_bags;  // [num_tables + 1] index of each table's first bag among all bags
  const ComeVectors* come;
  const int64_t* steps;
  const int64_t* numbers;  // in device memory, [num_tables] number of keys; null if it equals the
                           // table's number of vectors
  const int32_t* bags;     // in device memory
  const int32_t* places;   // in device memory, [entries]
};

// bad_place is the smallest position of an invalid element of `places`. bad_table is the smallest
// index of an invalid table, that is, a table with bags that decrease or exceed `entries`, or with
// more keys than entries.
struct ExchangeErrors {
  int64_t* bad_place;
  int64_t* bad_table;
};

int64_t exchange_rows_workspace_bytes(const ExchangeCall& call);

// Computes rows. A key with an invalid element of `places` gets the row -1. The rows of an invalid
// table are undefined.
void exchange_rows(const ExchangeCall& call, int32_t* rows, const ExchangeErrors& errors,
                   void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
