// Groups the distinct keys of many tables by the rank that owns them, and finds their vectors among
// the answers of the ranks.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/owner.h"

namespace sparsekit {

// A table of the call, with the owners of its keys.
struct RoutedTable : AskedTable {
  Owners owners;
};

// Output of group_bucketize.
struct RoutedKeys {
  int64_t* keys;     // [entries] the keys for rank 0, table by table; those for rank 1; and so on
  int64_t* counts;   // [world_size, tables] number of keys of each table for each rank
  int64_t* numbers;  // [tables] number of keys for all ranks
  int32_t* inverse;  // [entries] number of each entry's key in its table
  // [entries] from a table's first entry on: where each of its keys, by number, is among the
  // table's keys for rank 0, then those for rank 1, and so on.
  int32_t* places;
};

// The vectors of a table that one rank has sent, in rows of any unit. `end` is the number of the
// table's keys for this rank and all ranks before it. The vector of key j in that order begins at
// row `begin` + (j - `end` of the rank before) * step.
struct ComeVectors {
  int64_t begin, end;
};

namespace cpu {

// Returns the bytes of workspace, aligned to 64, for group_bucketize. Pass the same `order`
// [tables] to both.
int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for);

// Finds the distinct keys, or takes all keys if `distinct` is false, in order of first occurrence
// for each table and rank. `seed` as in unique(). Returns -1, or a table whose map of owners has a
// value that is not a rank; such keys then go to rank 0.
int64_t group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                        const Feature* features, int64_t world_size, bool distinct, int64_t seed,
                        const RoutedKeys& to, int32_t* order, void* workspace,
                        const ParallelFor& parallel_for);

// rows[first_entry + j] = row at which the vector of the table's key j begins. come [tables,
// world_size] tells where the vectors are; steps [tables] is the number of rows per vector.
void exchange_rows(const RoutedTable* tables, int64_t num_tables, int64_t world_size,
                   const ComeVectors* come, const int64_t* steps, const int32_t* places,
                   int32_t* rows, const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU versions, for call.routed. Nothing waits for the host.
namespace cuda {

// Returns the size of the workspace, which must be passed to begin_group first.
int64_t group_bucketize_workspace_bytes(const GroupCall& call, int64_t world_size, bool distinct);

// world_size * num_tables < 2^31. *bad_owners becomes the smallest number of a table whose map of
// owners has a value that is not a rank.
void group_bucketize(const GroupCall& call, const GroupBags& bags, int64_t world_size,
                     bool distinct, int64_t seed, const RoutedKeys& to, int64_t* bad_owners,
                     void* workspace, void* stream);

// Arguments of exchange_rows; the arrays are in host memory except where noted.
struct ExchangeCall {
  int64_t num_tables, world_size, entries;
  const int64_t* first_bags;  // [num_tables + 1] first bag of each table among the bags of all
  const ComeVectors* come;
  const int64_t* steps;
  const int32_t* bags;    // in device memory
  const int32_t* places;  // in device memory, [entries]
};

// Errors found: the smallest position of a bad place, and the smallest number of a table whose bags
// decrease or exceed `entries`, or that has fewer entries than keys have been received.
struct ExchangeErrors {
  int64_t* bad_place;
  int64_t* bad_table;
};

int64_t exchange_rows_workspace_bytes(const ExchangeCall& call);

// Writes -1 for rows of bad places, and nothing else for bad bags.
void exchange_rows(const ExchangeCall& call, int32_t* rows, const ExchangeErrors& errors,
                   void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
