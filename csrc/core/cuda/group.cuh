// Where the entries of features are, which on a device is known only there. One table after
// another, by the kernels for one: a launch for each of many small things, in place of a few for
// all.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/simt.cuh"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/group.h"

namespace sparsekit::cuda {

// A feature as a kernel needs it; entry[0] is its first entry, entry[1] that of the next.
struct DeviceFeature {
  Source source;
  int64_t first_bag, bags;
  int64_t most;  // keys of a bag
  int64_t* entry;

  // Bounds of its keys in those of the source; offsets may be anything.
  SPARSEKIT_HOST_DEVICE int64_t clamped(int64_t bag, int64_t least) const {
    const int64_t at = source.offset(bag);
    return at < least ? least : at > source.n ? source.n : at;
  }
  SPARSEKIT_HOST_DEVICE int64_t first_key() const { return clamped(first_bag, 0); }
  SPARSEKIT_HOST_DEVICE int64_t last_key() const { return clamped(first_bag + bags, first_key()); }
  // As many as it was found to have entries.
  SPARSEKIT_HOST_DEVICE int64_t count() const { return entry[1] - entry[0]; }
  // No more keys than it can have.
  int64_t bound() const { return source.offsets == nullptr ? bags : source.n; }
};

inline DeviceFeature device_feature(const Source* sources, const Feature* features, int64_t f,
                                    int64_t* entry) {
  const Feature& feature = features[f];
  return {sources[feature.source], feature.first_bag, feature.bags, feature.max_nnz, entry + f};
}

// A thread: entries of the feature, whose first one is known. `most` is how many all features have
// room for; where offsets are bad they might have more.
SPARSEKIT_KERNEL group_entries_kernel(DeviceFeature feature, bool is_first, int64_t most) {
  if (simt::global_thread() != 0) return;
  const int64_t begin = is_first ? 0 : feature.entry[0];
  if (is_first) feature.entry[0] = 0;
  const int64_t end = begin + (feature.last_key() - feature.first_key());
  feature.entry[1] = end < most ? end : most;
}

inline void group_entries(const DeviceFeature& feature, int64_t f, int64_t most, void* stream) {
  simt::launch("group: entries", group_entries_kernel, simt::grid_for(1, 32), stream, feature,
               f == 0, most);
}

}  // namespace sparsekit::cuda
