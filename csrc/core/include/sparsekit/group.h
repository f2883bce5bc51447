// Arguments of ops that work on many tables at once: where the keys are, and which table each run
// of bags looks up.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// An array of keys, divided into bags.
struct Source {
  const void* keys;     // [n], int64 or int32
  const void* offsets;  // [bags + 1], int64 or int32, from 0 to n; null: one key per bag
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

// Consecutive bags of a source that all look up the same table. Each key of these bags is an entry.
// Entries are numbered feature by feature. Features of the same table are adjacent, so the entries
// of a table are contiguous.
struct Feature {
  int64_t table, source;
  int64_t first_bag, bags;
  int64_t max_nnz;
  // Known on the host only if the source's offsets are in host memory:
  int64_t key_start, n, first_entry;
};

// The ranges of features and entries that belong to one table of a call.
struct AskedTable {
  int64_t first_feature, features;
  int64_t first_entry, n;  // known on the host only if offsets are in host memory
  int64_t end;             // keys must be in [0, end); -1 if any key is allowed
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

// Returns the first position in [first, last) of a key outside [0, end), or -1 if there is none.
int64_t check_keys(const Source& source, int64_t first, int64_t last, int64_t end,
                   const ParallelFor& parallel_for);

// Writes the first entry of each bag, feature by feature, followed by the number of entries, to
// bags [bags of all features + 1]. Writes each feature's key_start to key_starts [num_features].
void write_bags(const Source* sources, const Feature* features, int64_t num_features, int32_t* bags,
                int64_t* key_starts, const ParallelFor& parallel_for);

}  // namespace cpu

struct GroupTable;
struct NewRows;
struct RoutedTable;

// On a device, bad offsets are clamped to the range of their source's keys. Fields that the host
// would compute from offsets (key_start, n and first_entry of features; n and first_entry of
// tables) are not read.
namespace cuda {

// Tables, sources and features of a call; all arrays are in host memory.
struct GroupCall {
  const GroupTable* tables;   // [num_tables], unless `routed` is given
  const RoutedTable* routed;  // [num_tables] if keys are sent to their owners, else null
  const NewRows* new_rows;    // [num_tables], or null if nothing is inserted
  int64_t num_tables;
  const Source* sources;
  int64_t num_sources;
  const Feature* features;
  int64_t num_features;
  int64_t num_bags;  // total number of bags of all features
  int64_t entries;   // upper bound on the number of entries
};

// The smallest position of each kind of error. The caller initializes these positions to INT64_MAX.
// They are indices into the concatenation of all sources' offsets (for offsets and bags) or of all
// sources' keys.
struct GroupErrors {
  int64_t* bad_offset;
  int64_t* long_bag;
  int64_t* bad_key;
};

// Moves error words of the device, `words` [count], to `report` [count] in stream order, so that
// the host can read them later without a wait. Nothing is moved if count is 0.
struct ErrorReport {
  int64_t* words;
  int64_t* report;
  int64_t count;
};

// Outputs of begin_group, the same as those of cpu::write_bags.
struct GroupBags {
  int32_t* bags;        // [num_bags + 1]
  int64_t* key_starts;  // [num_features]
};

// Must be called before all other functions that use the entries of a call, with the same
// workspace. Writes `bags` and makes the same checks as cpu::check_bags and cpu::check_keys. Also
// checks that the offsets of each source begin at 0 and end at n. Bad offsets may describe more
// than call.entries entries; the excess is dropped.
void begin_group(const GroupCall& call, const GroupBags& bags, const GroupErrors& errors,
                 void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
