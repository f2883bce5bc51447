// Verifies all checksums in a snapshot, and checks what checksums cannot detect.
#pragma once

#include "serving/snapshot_file.h"

namespace sparsekit::serving {

// Reads the whole file. Every bucket of an index must be sound, every row must have exactly one
// key, which a search must find, and bytes between sections must be zeros. Returns an sk_status.
int verify(const SnapshotFile& file);

}  // namespace sparsekit::serving
