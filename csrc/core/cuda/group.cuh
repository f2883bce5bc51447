// The entries of a group of tables on a device. Each entry has a key and a table. The number of
// entries is known only on the device.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/descriptors.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/device_memory.h"
#include "sparsekit/group_bucketize.h"
#include "sparsekit/group_find.h"

namespace sparsekit::cuda {

struct DeviceSource {
  const void* keys;
  const void* offsets;
  int64_t first_offset;  // index of this source's first offset among the offsets of all sources
  int32_t key_start;     // index of this source's first key among the keys of all sources
  bool wide_keys, wide_offsets;
  bool asked;  // true if some feature uses this source
};

struct DeviceFeature {
  int32_t table, source;
  int64_t first_bag;
  int64_t first;  // index of the feature's first bag among the bags of all features
  int64_t max_nnz;
};

struct DeviceTable {
  Bucket* buckets;
  int64_t num_buckets;
  const int64_t* hash_seed;
  int64_t* size;
  int32_t capacity, world_size;
  void* weight;
  const int64_t* seed;
  Distribution distribution;
  float a, b;
  int32_t dim;
  int64_t stride;
  Bucket* larger;
  int64_t num_larger;
};

// See RoutedTable.
struct DeviceRoute {
  Owners owners;
  int64_t first_place;
  int32_t max_keys, unused;
};
static_assert(std::has_unique_object_representations_v<DeviceFeature> &&
                  std::has_unique_object_representations_v<DeviceRoute>,
              "kept copies are found by all of their bytes");

// Returns element i of an array of int64 or int32.
SPARSEKIT_DEVICE int64_t number_at(const void* array, bool wide, int64_t i) {
  return wide ? simt::global(static_cast<const int64_t*>(array))[i]
              : simt::global(static_cast<const int32_t*>(array))[i];
}
// Like Source::offset, but tells the compiler that offsets are in global memory.
SPARSEKIT_DEVICE int64_t offset_at(const Source& source, int64_t bag) {
  return source.offsets == nullptr ? bag : number_at(source.offsets, source.wide_offsets, bag);
}

// Descriptors of a call in device memory. Arrays of start positions have one extra element, the end
// of the last range.
struct DeviceGroup {
  const DeviceSource* sources;
  const DeviceFeature* features;
  const int32_t* first_features;  // [num_tables + 1]
  const int64_t* ends;            // [num_tables] AskedTable::end; null if no table limits its keys
  const DeviceTable* tables;      // [num_tables]; null unless keys are looked up or inserted
  const DeviceRoute* routes;      // [num_tables]; null unless keys are sent to their owners
  int32_t num_sources, num_features, num_tables;
  int32_t most;         // maximum number of entries, which is the capacity of result buffers
  int32_t* entry;       // [num_features + 1] first entry of each feature
  int64_t* key_starts;  // [num_features] position of the feature's first key in its source

  SPARSEKIT_DEVICE Source source(int s) const {
    const DeviceSource& of = sources[s];
    return {of.keys,
            of.offsets,
            of.wide_keys,
            of.wide_offsets,
            sources[s + 1].key_start - of.key_start,
            sources[s + 1].first_offset - of.first_offset - 1};
  }
  SPARSEKIT_DEVICE int64_t num_bags(int f) const {
    return features[f + 1].first - features[f].first;
  }

  SPARSEKIT_DEVICE int32_t entries() const { return entry[num_features]; }
  SPARSEKIT_DEVICE int feature_of(int32_t e) const {
    return last_up_to(e, num_features, [this](int f) { return entry[f]; });
  }
  SPARSEKIT_DEVICE int64_t key(int f, int32_t e) const {
    const DeviceSource& of = sources[features[f].source];
    return number_at(of.keys, of.wide_keys, key_starts[f] + (e - entry[f]));
  }
  SPARSEKIT_DEVICE int32_t first_entry(int t) const { return entry[first_features[t]]; }
  SPARSEKIT_DEVICE bool takes(int t, int64_t key) const {
    if (ends == nullptr || ends[t] < 0) return true;
    return key >= 0 && key < ends[t];
  }
};

// Returns the offset of a bag, clamped to [least, source.n] since offsets may be bad.
SPARSEKIT_DEVICE int64_t clamped_offset(const Source& source, int64_t bag, int64_t least) {
  const int64_t at = offset_at(source, bag);
  return at < least ? least : at > source.n ? source.n : at;
}

// Moves the error words to the report, with one thread per word. Other calls may report errors at
// the same time.
SPARSEKIT_DEVICE void move_errors(const ErrorReport& errors) {
  const int64_t i = simt::global_thread();
  if (i >= errors.count) return;
  errors.report[i] = simt::atomic_exchange(&errors.words[i], kNoPosition);
}

// Returns the group of a call, placed at the beginning of the workspace. After begin_group has
// filled that memory, all functions of the call may use it.
DeviceGroup device_group(const GroupCall& call, const GroupBags& bags, Arena& arena);

}  // namespace sparsekit::cuda
