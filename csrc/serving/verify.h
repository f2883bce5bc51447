// Compares all checksums of a snapshot, and checks what they cannot tell.
#pragma once

#include "serving/snapshot_file.h"

namespace sparsekit::serving {

// Reads the whole file. Each bucket of an index must be sound, each row must have exactly one key,
// which a search finds, and bytes between sections must be zeros. Returns an sk_status.
int verify(const SnapshotFile& file);

}  // namespace sparsekit::serving
