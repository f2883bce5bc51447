// Arguments of ops that process many tables in one call. They tell where the keys are, and which
// table each run of bags uses.
#pragma once

#include <cstdint>

#include "sparsekit/device_memory.h"
#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

// An array of keys, divided into bags.
struct Source {
  const void* keys;     // [n], int64 or int32
  const void* offsets;  // [bags + 1], int64 or int32, from 0 to n; if null, each bag has one key
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
  // The next fields are known on the host only if the source's offsets are in host memory.
  int64_t key_start, n, first_entry;
};

// The ranges of features and entries that belong to one table of a call.
struct AskedTable {
  int64_t first_feature, features;
  int64_t first_entry, n;  // known on the host only if offsets are in host memory
  int64_t end;             // keys must be in [0, end); -1 allows any key
};

namespace cpu {

enum class BadBag { kNone, kOffset, kTooLong };

struct BagCheck {
  BadBag what = BadBag::kNone;
  int64_t position = -1;  // position of the bad offset or bag
};

// Checks that the offsets of the bags [first, last) of a source never decrease and stay within the
// source's keys, and that no bag has more than `most` keys.
BagCheck check_bags(const Source& source, int64_t first, int64_t last, int64_t most,
                    const ParallelFor& parallel_for);

// Returns the first position in [first, last) of a key outside [0, end), or -1 if there is none.
int64_t check_keys(const Source& source, int64_t first, int64_t last, int64_t end,
                   const ParallelFor& parallel_for);

// Writes the first entry of each bag to bags [bags of all features + 1], feature by feature,
// followed by the total number of entries. Writes each feature's key_start to key_starts
// [num_features].
void write_bags(const Source* sources, const Feature* features, int64_t num_features, int32_t* bags,
                int64_t* key_starts, const ParallelFor& parallel_for);

}  // namespace cpu

struct GroupTable;
struct NewRows;
struct RoutedTable;

// On a device, bad offsets are clamped to the range of their source's keys. The fields that the
// host can compute only from offsets are not read: key_start, n and first_entry of features, and n
// and first_entry of tables.
namespace cuda {

// Tables, sources and features of a call. All arrays are in host memory.
struct GroupCall {
  const GroupTable* tables;   // [num_tables]; not used if `routed` is given
  const RoutedTable* routed;  // [num_tables]; null unless keys are sent to their owners
  const NewRows* new_rows;    // [num_tables]; null if nothing is inserted
  int64_t num_tables;
  const Source* sources;
  int64_t num_sources;
  const Feature* features;
  int64_t num_features;
  int64_t num_bags;  // total number of bags of all features
  int64_t entries;   // upper bound on the number of entries
  const void* kept;  // result of keep_descriptors()
};

// Keeps those descriptors of a call on the device that remain the same while its tables and numbers
// of bags do, and returns their copy. Returns null if a single launch can bring all descriptors.
const void* keep_descriptors(const GroupCall& call, const KeepOnDevice& keep);

// The smallest position where each kind of error occurs. The caller initializes these positions to
// INT64_MAX. Positions of offsets and bags are indices into the concatenated offsets of all
// sources; positions of keys are indices into the concatenated keys of all sources.
struct GroupErrors {
  int64_t* bad_offset;
  int64_t* long_bag;
  int64_t* bad_key;
};

// The device's error words. They are moved from words [count] to report [count] in stream order, so
// that the host can read them later without waiting. If count is 0, nothing is moved.
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

// Writes `bags` and makes the same checks as cpu::check_bags and cpu::check_keys. Also checks that
// the offsets of each source begin at 0 and end at n. Bad offsets may describe more than
// call.entries entries; the excess is dropped. Call this function before all other functions that
// use the entries of the call, with the same workspace.
void begin_group(const GroupCall& call, const GroupBags& bags, const GroupErrors& errors,
                 void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
