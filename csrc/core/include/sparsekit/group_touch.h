// Notes in a table's scores which rows a lookup has touched, so that the least valuable rows can be
// found later.
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

// A point in time at which LFU words are read and written. A word has in its upper half how often
// the row was touched, and in its lower half the clock at the last touch. Counts are halved
// whenever the clock reaches a multiple of halve_every; never, if that is 0.
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

  // Returns the count of a word as it is now.
  SPARSEKIT_HOST_DEVICE uint64_t age(int64_t word) const {
    const uint64_t count = static_cast<uint64_t>(word) >> 32;
    const auto then = static_cast<uint32_t>(word);
    // Most rows of a lookup were touched a short time ago, so this spares most divisions.
    if (then >= last_halving_) return count;
    const uint32_t missed = halvings_ - then / halve_every_;
    return missed < 32 ? count >> missed : 0;
  }

  // Returns the word after `touches` more touches.
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

// Scores of the rows of one table of a lookup.
struct TouchedTable {
  ScorePolicy policy;
  int64_t halve_every;
  const int64_t* clock;  // in the memory of the engine's device
  int64_t* scores;       // [capacity]
  int64_t capacity;
  // The table's entries and its distinct keys; used only on the CPU.
  int64_t first_entry, n;
  int64_t num_distinct;
};

// What a lookup has found, as group_find_or_insert writes it.
struct FoundRows {
  const int32_t* index;  // [entries]
  const int32_t* rows;   // [entries]
  // [entries] the number of touches for which each entry stands, or null; negative numbers count as
  // 0, and numbers above LfuClock::kMostTouches as that many.
  const int64_t* occurrences;
};

// Returns the number of touches for which entry e stands.
SPARSEKIT_HOST_DEVICE inline uint64_t touches_of(const int64_t* occurrences, int64_t e) {
  if (occurrences == nullptr) return 1;
  const int64_t given = occurrences[e];
  if (given < 0) return 0;
  const auto touches = static_cast<uint64_t>(given);
  return touches < LfuClock::kMostTouches ? touches : LfuClock::kMostTouches;
}

namespace cpu {

// Returns the size in bytes of the workspace for group_touch. The workspace must be 64-byte
// aligned. Pass the same buffer `order` [tables] to both functions.
int64_t group_touch_workspace_bytes(const TouchedTable* tables, int64_t num_tables, int32_t* order,
                                    const ParallelFor& parallel_for);

// Writes the score of each distinct row. Skips rows outside [0, capacity), and entries whose index
// is not that of a distinct key. A table without scores or policy costs nothing.
void group_touch(const TouchedTable* tables, int64_t num_tables, const FoundRows& found,
                 int32_t* order, void* workspace, const ParallelFor& parallel_for);

}  // namespace cpu
}  // namespace sparsekit
