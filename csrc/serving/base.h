// A file of a snapshot with what belongs to it while deltas come.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "serving/snapshot_file.h"
#include "serving/spare_rows.h"
#include "serving/version.h"

namespace sparsekit::serving {

// Both sides of a snapshot may use a base; after a rebase, one of them uses the next one.
struct Base {
  explicit Base(std::unique_ptr<SnapshotFile> opened);

  // Lets go of the indexes of the file, once both sides have others.
  void drop_indexes();

  std::unique_ptr<SnapshotFile> file;
  uint64_t log_id;
  Version version;               // the tables as they are in the file
  std::vector<SpareRows> spare;  // of each table
};

}  // namespace sparsekit::serving
