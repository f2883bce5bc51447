// Opens snapshot files: checks them, and maps their sections into memory.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "serving/format.h"
#include "serving/include/sparsekit_serving.h"
#include "serving/memory.h"
#include "serving/version.h"

namespace sparsekit::serving {

// A table in an open file.
struct FileTable {
  TableRecord record;
  std::string name;
  Memory index;  // of the file, read-only
  // The file's rows, read-only, followed by addresses reserved for rows from deltas, without memory
  // (PROT_NONE). Rows from deltas have the numbers [spare_begin, spare_end), and start after the
  // file's pages.
  Memory rows;
  int64_t spare_begin = 0;
  int64_t spare_end = 0;
};

class OpenFile {
 public:
  explicit OpenFile(int descriptor = -1) : descriptor_(descriptor) {}
  OpenFile(OpenFile&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  OpenFile& operator=(OpenFile&& other) noexcept {
    std::swap(descriptor_, other.descriptor_);
    return *this;
  }
  ~OpenFile() {
    if (descriptor_ >= 0) close(descriptor_);
  }

  int descriptor() const { return descriptor_; }

 private:
  int descriptor_;
};

// An open snapshot file with its rows mapped or copied. The rows of the file never change.
struct SnapshotFile {
  std::string path;
  sk_open_options options;
  OpenFile file;  // stays open, so that private_index() works after the file is removed
  SnapshotHeader header;
  std::vector<FileTable> tables;
};

// Opens a file and checks its header and directory or, with options.verify, the whole file. A
// hostile file cannot cause an allocation larger than itself. Returns an sk_status.
int open_file(const std::string& path, const sk_open_options& options,
              std::unique_ptr<SnapshotFile>* opened);

// Maps a writable copy of a table's index from the file. Writes change neither the file nor other
// mappings.
int private_index(const SnapshotFile& file, size_t table, Memory* index);

// Returns the description of the file's tables for lookups. The file must outlive the result.
Version version_of(const SnapshotFile& file);

}  // namespace sparsekit::serving
