// Arguments of an op on many tables: sources of keys, and the table that each run of bags asks.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// Keys and how they are cut into bags.
struct Source {
  const void* keys;     // [n], int64 or int32
  const void* offsets;  // [bags + 1], int64 or int32, from 0 to n; null: each key is a bag
  bool wide_keys, wide_offsets;
  int64_t n, bags;

  SPARSEKIT_HOST_DEVICE int64_t key(int64_t i) const {
    return wide_keys ? static_cast<const int64_t*>(keys)[i] : static_cast<const int32_t*>(keys)[i];
  }
  SPARSEKIT_HOST_DEVICE int64_t offset(int64_t bag) const {
    if (offsets == nullptr) return bag;
    return wide_offsets ? static_cast<const int64_t*>(offsets)[bag]
                        : static_cast<const int32_t*>(offsets)[bag];
  }
};

// A run of a source's bags, for one table. An entry is a key of such a bag. Entries are numbered
// feature by feature; the features of a table are neighbours, so its entries are contiguous.
struct Feature {
  int64_t table, source;
  int64_t first_bag, bags;
  int64_t max_nnz;
  // Known on the host only if the offsets are in its memory:
  int64_t key_start, n, first_entry;
};

// Features and entries of one table of a call.
struct AskedTable {
  int64_t first_feature, features;
  int64_t first_entry, n;  // known on the host only if offsets are in its memory
  int64_t end;             // keys are in [0, end); -1 if any key is allowed
};

namespace cpu {

enum class BadBag { kNone, kOffset, kTooLong };

struct BagCheck {
  BadBag what = BadBag::kNone;
  int64_t position = -1;  // position of the bad offset or bag
};

// Checks that the offsets of the bags [first, last) of a source never decrease and stay within its
// keys, and that no bag has more than `most` keys.
BagCheck check_bags(const Source& source, int64_t first, int64_t last, int64_t most,
                    const ParallelFor& parallel_for);

// Returns the first position of a key outside [0, end) among [first, last), or -1.
int64_t check_keys(const Source& source, int64_t first, int64_t last, int64_t end,
                   const ParallelFor& parallel_for);

// Writes the entry at which each bag of the features begins, feature by feature, and then the
// number of entries, to bags [bags of all features + 1]; and each feature's key_start to
// key_starts.
void write_bags(const Source* sources, const Feature* features, int64_t num_features, int32_t* bags,
                int64_t* key_starts, const ParallelFor& parallel_for);

}  // namespace cpu

struct GroupTable;
struct NewRows;
struct RoutedTable;

// On a device, bad offsets are clamped to the range of their source's keys. Fields that follow from
// offsets (key_start, n and first_entry of features; n and first_entry of tables) are not read.
namespace cuda {

// Tables, sources and features of a call; all arrays are in host memory.
struct GroupCall {
  const GroupTable* tables;   // [num_tables], unless `routed` is given
  const RoutedTable* routed;  // [num_tables] if keys go to their owners, else null
  const NewRows* new_rows;    // [num_tables], or null if nothing is inserted
  int64_t num_tables;
  const Source* sources;
  int64_t num_sources;
  const Feature* features;
  int64_t num_features;
  int64_t num_bags;  // number of bags of all features
  int64_t entries;   // upper bound of the number of entries
};

// Smallest positions of errors, each set to INT64_MAX by the caller. The position of an offset or a
// bag counts from the first offset of the first source, that of a key from the first key of the
// first source.
struct GroupErrors {
  int64_t* bad_offset;
  int64_t* long_bag;
  int64_t* bad_key;
};

// Output of begin_group, the same as that of cpu::write_bags.
struct GroupBags {
  int32_t* bags;        // [num_bags + 1]
  int64_t* key_starts;  // [num_features]
};

// Runs before any other function that uses the entries of a call, in the same workspace. Writes
// `bags` and makes the checks of cpu::check_bags and cpu::check_keys; checks also that the offsets
// of each source begin at 0 and end at n. With bad offsets, there may be more entries than
// `entries`; the excess is cut off.
void begin_group(const GroupCall& call, const GroupBags& bags, const GroupErrors& errors,
                 void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
