// Records in a table's scores which rows a lookup touched, so that the least valuable rows can
// later be found.
#pragma once

#include <cstdint>

#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

enum class ScorePolicy : int64_t {
  kNone,
  kLru,  // a score is the clock at the last touch
  kLfu,  // a score is a word of LfuClock
};

// A point in time for reading and writing LFU words. A word's upper half counts how often the row
// was touched, and its lower half is the clock at the last touch. Counts are halved whenever the
// clock reaches a multiple of halve_every, or never if halve_every is 0.
class LfuClock {
 public:
  static constexpr uint64_t kMostTouches = 0xFFFFFFFF;

  // The upper half of `clock` is ignored.
  SPARSEKIT_HOST_DEVICE LfuClock(int64_t clock, int64_t halve_every)
      : now_(static_cast<uint32_t>(clock)) {
    if (halve_every <= 0 || halve_every > 0xFFFFFFFF) return;
    halve_every_ = static_cast<uint32_t>(halve_every);
    halvings_ = now_ / halve_every_;
    last_halving_ = halvings_ * halve_every_;
  }

  // Returns the count in a word, as of this time.
  SPARSEKIT_HOST_DEVICE uint64_t age(int64_t word) const {
    const uint64_t count = static_cast<uint64_t>(word) >> 32;
    const auto then = static_cast<uint32_t>(word);
    // Most rows in a lookup were touched recently, so this avoids most divisions.
    if (then >= last_halving_) return count;
    const uint32_t missed = halvings_ - then / halve_every_;
    return missed < 32 ? count >> missed : 0;
  }

  // Returns the word that results from `touches` more touches.
  SPARSEKIT_HOST_DEVICE int64_t add(int64_t word, uint64_t touches) const {
    const uint64_t count = age(word);
    const uint64_t sum = touches < kMostTouches - count ? count + touches : kMostTouches;
    return static_cast<int64_t>(sum << 32 | now_);
  }

 private:
  uint32_t now_;
  // Without halving, no time is before last_halving_.
  uint32_t halve_every_ = 1, halvings_ = 0, last_halving_ = 0;
};

// A table with scores, and the range of the lookup's bags that use the table.
struct TouchedTable {
  ScorePolicy policy;
  int64_t halve_every;
  int64_t* clock;   // on a device, in device memory
  int64_t ticks;    // how far the lookup advances the clock
  int64_t* scores;  // [capacity]
  int64_t capacity;
  int64_t table;            // index among the tables of the lookup
  int64_t first_bag, bags;  // counted over the bags of all features
};

// The results of group_find_or_insert.
struct FoundRows {
  int64_t entries;        // upper bound on the number of entries
  const int32_t* index;   // [entries]
  const int32_t* rows;    // [entries]
  const int64_t* counts;  // [tables of the lookup]
  const int32_t* bags;    // [bags of all features + 1]
  // [entries] the number of touches that each entry stands for; null if each is one touch.
  const int64_t* occurrences;

  // Returns the number of touches that entry e stands for, clamped to [0, kMostTouches].
  SPARSEKIT_HOST_DEVICE uint64_t touches(int64_t e) const {
    if (occurrences == nullptr) return 1;
    if (occurrences[e] < 0) return 0;
    const auto given = static_cast<uint64_t>(occurrences[e]);
    return given < LfuClock::kMostTouches ? given : LfuClock::kMostTouches;
  }
};

namespace cpu {

// Returns the size in bytes of the workspace for group_touch. The workspace must be 64-byte
// aligned. Pass the same buffer `order` [tables] to both functions.
int64_t group_touch_workspace_bytes(const TouchedTable* tables, int64_t num_tables,
                                    const FoundRows& found, int32_t* order,
                                    const ParallelFor& parallel_for);

// Advances the clocks, and writes the score of each distinct row. Skips rows outside [0, capacity),
// and entries whose index is not the index of a distinct key. Preconditions: check_bags reports no
// error, and the counts of distinct keys do not exceed the numbers of entries.
void group_touch(const TouchedTable* tables, int64_t num_tables, const FoundRows& found,
                 int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu

// Like the CPU version, but without preconditions: bags and counts are clamped to the actual
// entries. `tables` and `on_device` are the same tables in host and device memory, in the order of
// their bags. Makes one launch, or two if any table uses LFU or has nonzero ticks.
namespace cuda {

void group_touch(const TouchedTable* tables, const TouchedTable* on_device, int64_t num_tables,
                 const FoundRows& found, void* stream);

}  // namespace cuda
}  // namespace sparsekit
