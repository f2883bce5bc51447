// Reads delta files.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "serving/format.h"
#include "serving/version.h"

namespace sparsekit::serving {

// A checked section of a delta. Its keys and rows are in the DeltaFile's memory.
struct Section {
  int32_t table;
  bool tombstones;
  int64_t num_keys;
  const int64_t* keys;
  const uint8_t* rows;  // [num_keys, row_bytes]; null for tombstones
};

// One rank's delta, read and checked as a whole. It is read into memory, not mapped: the file may
// be in a shared folder, and may be removed or truncated at any time.
struct DeltaFile {
  DeltaHeader header;
  std::vector<Section> sections;
  int64_t num_upserts = 0;
  std::unique_ptr<uint64_t[]> data;

  // Reads a file, compares all checksums, and checks that its tables match `tables`. Returns an
  // sk_status; on an error, `*missing` is true if the file does not exist.
  int read(const std::string& path, uint64_t log_id, const std::vector<TableView>& tables,
           bool* missing);
};

}  // namespace sparsekit::serving
