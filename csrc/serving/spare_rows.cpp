#include "serving/spare_rows.h"

#include <sys/mman.h>

#include <algorithm>

#include "serving/format.h"

namespace sparsekit::serving {
namespace {

// Minimum number of bytes to back with memory at a time.
constexpr int64_t kPiece = 2 << 20;

}  // namespace

SpareRows::SpareRows(uint8_t* rows, int64_t row_bytes, int64_t first, int64_t most, bool lock)
    : rows_(rows),
      row_bytes_(row_bytes),
      first_(first),
      most_(most),
      lock_(lock),
      next_(first),
      limit_(first) {}

SpareRows::Room SpareRows::reserve(int64_t n) {
  const int64_t needed = next_ + std::max<int64_t>(0, n - static_cast<int64_t>(free_.size()));
  if (needed > most_) return Room::kFull;
  if (needed <= limit_) return Room::kYes;
  // Grow by at least an eighth, so that large tables rarely ask the system for memory.
  const int64_t step = std::max({needed - limit_, (limit_ - first_) / 8, kPiece / row_bytes_});
  const int64_t limit = std::min(most_, limit_ + step);
  batch_of_.resize(limit - first_);
  free_.reserve(limit - first_);  // so that give_back() cannot fail
  // The page with the first byte may have memory already; requesting it again is harmless. On the
  // first call, also back the row that begins in the file's last page: only a damaged index refers
  // to it, but lookups may read any row below the limit.
  const int64_t row = limit_ > first_ ? limit_ : std::max<int64_t>(0, first_ - 1);
  const auto begins = reinterpret_cast<uintptr_t>(rows_ + row * row_bytes_);
  const auto from = (limit_ > first_ ? begins : begins + kPage - 1) / kPage * kPage;
  const auto to = reinterpret_cast<uintptr_t>(rows_ + limit * row_bytes_);
  auto* const begin = reinterpret_cast<void*>(from);
  if (::mprotect(begin, to - from, PROT_READ | PROT_WRITE) != 0) return Room::kNoMemory;
  if (lock_ && ::mlock(begin, to - from) != 0) return Room::kNoMemory;
  limit_ = limit;
  return Room::kYes;
}

int32_t SpareRows::take(uint32_t batch) {
  int64_t row;
  if (free_.empty()) {
    row = next_++;
  } else {
    row = free_.back();
    free_.pop_back();
  }
  batch_of_[row - first_] = batch;
  return static_cast<int32_t>(row);
}

void SpareRows::give_back(const std::vector<int32_t>& rows) {
  for (const int32_t row : rows) {
    // A damaged index may contain a row twice; give it back only once.
    if (!owns(row) || batch_of_[row - first_] == 0) continue;
    batch_of_[row - first_] = 0;
    free_.push_back(row);
  }
}

}  // namespace sparsekit::serving
