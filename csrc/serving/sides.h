// The two sides of a snapshot; deltas change their tables, one side at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "serving/base.h"
#include "serving/delta_file.h"
#include "serving/live_index.h"
#include "serving/version.h"

namespace sparsekit::serving {

// One side of a snapshot. `indexes` is empty while its tables are still those of the file.
struct Side {
  std::shared_ptr<Base> base;
  std::vector<LiveIndex> indexes;
  Version version;
};

// Changes to one side since both sides were last equal.
struct Batch {
  struct Edit {
    int64_t key;
    int32_t row;  // -1: the key is removed
  };
  struct OfTable {
    std::vector<Edit> edits;
    std::vector<int32_t> left;  // rows that the edits have replaced: free once both sides have them
    std::vector<int32_t> taken;  // rows that the edits use
  };
  std::vector<OfTable> tables;
  uint32_t number = 1;  // tells the batch's rows from those that lookups may read
  int64_t rows_written = 0;
  int64_t rows_erased = 0;
  int64_t versions = 0;
};

// Makes a side that equals the file and can be changed. Returns an sk_status.
int begin_side(std::shared_ptr<Base> base, Side* side);

// Applies the parts of a version from all ranks to a side that no lookup is reading. On
// SK_NO_MEMORY, nothing has changed. On SK_DAMAGED (an index is damaged), the side is unusable.
int apply_version(const std::vector<DeltaFile>& parts, Side* side, Batch* batch);

// Makes a batch's changes to the other side, which no lookup is reading. Returns the same errors as
// apply_version().
int replay(const Batch& batch, const Version& to, Side* side);

// Makes `side` equal to another side, which lookups may be reading. Returns an sk_status.
int copy_side(const Side& from, Side* side);

// Frees a batch's rows: those that its changes replaced, once both sides have the changes; or those
// that it took, if neither side will ever have the changes.
void give_back_left(const Batch& batch, Base* base);
void give_back_taken(const Batch& batch, Base* base);

}  // namespace sparsekit::serving
