// Distinct keys of many tables, grouped by the rank that owns them; where their vectors lie among
// what the ranks answer.
#pragma once

#include <cstdint>

#include "sparsekit/group.h"
#include "sparsekit/owner.h"

namespace sparsekit {

// Who owns the keys of one of the tables.
struct RoutedTable : AskedTable {
  Owners owners;
};

// Output of group_bucketize.
struct RoutedKeys {
  int64_t* keys;     // [entries] the keys for rank 0, table by table; those for rank 1; and so on
  int64_t* counts;   // [world_size, tables] keys
  int64_t* numbers;  // [tables] keys for all ranks
  int32_t* inverse;  // [entries] number of each entry's key in its table
  int32_t* places;   // [entries] from a table's first entry on: where each of its keys, by number,
                     // is among those for rank 0, then rank 1, and so on
};

// The vectors of a table that have come from a rank, in rows of any unit: that of key number j
// among those of the table for this and all ranks before it, of which there are `end`, begins at
// row `begin` + (j - end of the rank before) * step.
struct ComeVectors {
  int64_t begin, end;
};

namespace cpu {

// Bytes of workspace, aligned to 64, for group_bucketize; `order` [tables] is for both of them.
int64_t group_bucketize_workspace_bytes(const RoutedTable* tables, int64_t num_tables,
                                        int64_t entries, int32_t* order,
                                        const ParallelFor& parallel_for);

// Distinct keys, or all where `distinct` is false, in order of first occurrence for each table and
// rank. `seed` as in unique(). Returns -1, or a table whose owners name a rank that there is not;
// its keys then go to rank 0.
int64_t group_bucketize(const RoutedTable* tables, int64_t num_tables, const Source* sources,
                        const Feature* features, int64_t world_size, bool distinct, int64_t seed,
                        const RoutedKeys& to, int32_t* order, void* workspace,
                        const ParallelFor& parallel_for);

// rows[first_entry + j] = row at which the vector of the table's key number j begins. come
// [tables, world_size] says where they have come; steps [tables] is how many rows a vector takes.
void exchange_rows(const RoutedTable* tables, int64_t num_tables, int64_t world_size,
                   const ComeVectors* come, const int64_t* steps, const int32_t* places,
                   int32_t* rows, const ParallelFor& parallel_for);

}  // namespace cpu

// As on the CPU, with call.routed. Nothing waits for the host.
namespace cuda {

// Size of the workspace, which begin_group is given first.
int64_t group_bucketize_workspace_bytes(const GroupCall& call, int64_t world_size, bool distinct);

// world_size * num_tables < 2^31. *bad_owners is the smallest number of a table whose owners name a
// rank that there is not.
void group_bucketize(const GroupCall& call, const GroupBags& bags, int64_t world_size,
                     bool distinct, int64_t seed, const RoutedKeys& to, int64_t* bad_owners,
                     void* workspace, void* stream);

// Arguments of exchange_rows.
struct ExchangeCall {
  int64_t num_tables, world_size, entries;
  const int64_t* first_bags;  // [num_tables + 1] of each table among those of all
  const ComeVectors* come;
  const int64_t* steps;
  const int32_t* bags;    // on the device, as are
  const int32_t* places;  // [entries]
};

// Errors found: the smallest position of a bad place, and of a table whose bags do not rise to
// at most `entries`, or which has fewer entries than keys that have come.
struct ExchangeErrors {
  int64_t* bad_place;
  int64_t* bad_table;
};

int64_t exchange_rows_workspace_bytes(const ExchangeCall& call);

// Rows of bad places are -1; nothing else is written for bags that are bad.
void exchange_rows(const ExchangeCall& call, int32_t* rows, const ExchangeErrors& errors,
                   void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
