#include "serving/base.h"

#include <utility>

namespace sparsekit::serving {

Base::Base(std::unique_ptr<SnapshotFile> opened)
    : file(std::move(opened)), log_id(file->header.log_id), version(version_of(*file)) {
  for (const FileTable& table : file->tables) {
    spare.emplace_back(static_cast<uint8_t*>(table.rows.data()), table.record.row_bytes,
                       table.spare_begin, table.spare_end, file->options.lock != 0);
  }
}

void Base::drop_indexes() {
  for (FileTable& table : file->tables) table.index = Memory();
}

}  // namespace sparsekit::serving
