// A table's additional rows, which are in memory but not in its file.
#pragma once

#include <cstdint>
#include <vector>

namespace sparsekit::serving {

// Hands out rows that neither side of a snapshot refers to; both sides may then use them. The
// addresses after the file's rows are reserved, and are backed with memory as rows are needed.
class SpareRows {
 public:
  SpareRows() = default;
  // Row r begins at rows + r * row_bytes. Rows [first, most) come after the file's pages. `lock`
  // keeps them in memory (mlock).
  SpareRows(uint8_t* rows, int64_t row_bytes, int64_t first, int64_t most, bool lock);

  enum class Room { kYes, kFull, kNoMemory };
  // Makes sure that n calls of take() will succeed.
  Room reserve(int64_t n);

  // Returns a row for batch number `batch`.
  int32_t take(uint32_t batch);

  // Returns true if this batch took the row, so that no lookup reads it yet.
  bool is_of(uint32_t batch, int64_t row) const {
    return owns(row) && batch_of_[row - first_] == batch;
  }

  // Takes back rows that no side refers to any more; rows from the file are ignored.
  void give_back(const std::vector<int32_t>& rows);

  uint8_t* at(int32_t row) const { return rows_ + row * row_bytes_; }

  // Returns the end of the rows that are backed with memory; 0 until reserve() has backed some.
  int64_t limit() const { return limit_ > first_ ? limit_ : 0; }
  int64_t in_use() const { return next_ - first_ - static_cast<int64_t>(free_.size()); }

 private:
  bool owns(int64_t row) const { return row >= first_ && row < next_; }

  uint8_t* rows_ = nullptr;
  int64_t row_bytes_ = 0;
  int64_t first_ = 0;
  int64_t most_ = 0;
  bool lock_ = false;
  int64_t next_ = 0;   // rows from here on have never been taken
  int64_t limit_ = 0;  // rows from here on have no memory
  std::vector<int32_t> free_;
  std::vector<uint32_t> batch_of_;  // of each row from first_ on; 0 while it is free
};

}  // namespace sparsekit::serving
