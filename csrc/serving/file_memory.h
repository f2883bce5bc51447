// Brings parts of a file into memory, as the options say.
#pragma once

#include <cstddef>
#include <cstdint>

#include "serving/memory.h"
#include "serving/snapshot_file.h"

namespace sparsekit::serving {

// Returns the multiple of bytes at which memory for a part of the file ends.
uint64_t part_alignment(const sk_open_options& options);

// Reserves addresses, without memory, for the part of the file from `offset` on: `part` bytes, a
// multiple of part_alignment(), and `spare` bytes behind them. The result is empty if there are too
// few addresses.
Memory reserve(const sk_open_options& options, uint64_t offset, uint64_t part, uint64_t spare);

// Maps or copies a part of the file, read-only, to addresses from reserve(). Returns an sk_status.
int load_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to);

// Reads a part of the file.
int read_part(const SnapshotFile& file, uint64_t offset, uint64_t bytes, void* to);

}  // namespace sparsekit::serving
