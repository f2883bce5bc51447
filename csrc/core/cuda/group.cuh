// The entries of a group on a device: which key each is, of which table. How many there are, only
// the device knows.
#pragma once

#include <cstdint>

#include "cuda/descriptors.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/group_bucketize.h"
#include "sparsekit/group_find.h"

namespace sparsekit::cuda {

struct DeviceSource {
  const void* keys;
  const void* offsets;
  int64_t first_offset;  // counted over all sources, as is key_start; the next one's says how many
  int32_t key_start;
  bool wide_keys, wide_offsets;
  bool asked;  // by some feature
};

struct DeviceFeature {
  int32_t table, source;
  int64_t first_bag;
  int64_t first;  // of its bags among those of all features
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
};

// Element i of an array of int64 or int32.
SPARSEKIT_DEVICE int64_t number_at(const void* array, bool wide, int64_t i) {
  return wide ? simt::global(static_cast<const int64_t*>(array))[i]
              : simt::global(static_cast<const int32_t*>(array))[i];
}
// As Source::offset, which does not know where offsets are.
SPARSEKIT_DEVICE int64_t offset_at(const Source& source, int64_t bag) {
  return source.offsets == nullptr ? bag : number_at(source.offsets, source.wide_offsets, bag);
}

// Arrays that say where something begins have one element more, which ends the last one.
struct DeviceGroup {
  const DeviceSource* sources;
  const DeviceFeature* features;
  const int32_t* first_features;  // [num_tables + 1]
  const int64_t* ends;            // [num_tables] as in AskedTable; null if any key is fine
  const DeviceTable* tables;      // [num_tables], or
  const Owners* owners;           // [num_tables]
  int32_t num_sources, num_features, num_tables;
  int32_t most;         // entries that results have room for
  int32_t* entry;       // [num_features + 1] the first of each feature
  int64_t* key_starts;  // [num_features] where that is in its source

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

// An offset, kept within [least, n]: they may be anything.
SPARSEKIT_DEVICE int64_t clamped_offset(const Source& source, int64_t bag, int64_t least) {
  const int64_t at = offset_at(source, bag);
  return at < least ? least : at > source.n ? source.n : at;
}

// The group of a call: where everything lies in the workspace, of which this takes the first part.
// Once begin_group has filled it, every function of the call may ask for it.
DeviceGroup device_group(const GroupCall& call, const GroupBags& bags, Arena& arena);

}  // namespace sparsekit::cuda
