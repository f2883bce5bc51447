// Loads parts of a file into memory, as the options specify.
#pragma once

#include <cstddef>
#include <cstdint>

#include "serving/memory.h"
#include "serving/snapshot_file.h"

namespace sparsekit::serving {

// Returns the unit, in bytes, to which the memory for a part of the file is rounded up.
uint64_t part_alignment(const sk_open_options& options);

// Reserves addresses, without memory, for the part of the file that begins at `offset`: `part`
// bytes, a multiple of part_alignment(), then `spare` bytes. The result is empty if there are too
// few addresses.
Memory reserve(const sk_open_options& options, uint64_t offset, uint64_t part, uint64_t spare);

// Maps or copies a part of the file, read-only, to addresses from reserve(). Returns an sk_status.
int load_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to);

// Reads a part of the file.
int read_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to);

}  // namespace sparsekit::serving
