// A snapshot's file, and the memory for rows that deltas add to it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "serving/snapshot_file.h"
#include "serving/spare_rows.h"
#include "serving/version.h"

namespace sparsekit::serving {

// Both sides of a snapshot may use the same base; when a newer base appears, one side switches to
// it before the other does.
struct Base {
  explicit Base(std::unique_ptr<SnapshotFile> opened);

  // Unmaps the file's own indexes, once both sides have indexes of their own.
  void drop_indexes();

  std::unique_ptr<SnapshotFile> file;
  uint64_t log_id;
  Version version;               // the tables as they are in the file
  std::vector<SpareRows> spare;  // of each table
};

}  // namespace sparsekit::serving
