// Implements unique() by splitting the keys into ranges, one per thread.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/distinct_key_map.h"
#include "sparsekit/arena.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

constexpr int64_t kLeastRange = 8192;
constexpr int kMaxRanges = 32;

// The range-based algorithm: each thread numbers a range of the keys. Then the ranges are processed
// in order: threads divide the range's distinct keys and look them up in the earlier ranges, whose
// tables no longer change. Keys that are not found are new.
template <class Key, class Index>
class ByRange {
 public:
  ByRange(Arena& arena, int64_t n, int64_t seed) : n_(n), seed_(seed) {
    distinct_ = arena.take<Distinct<Key>>(n);
    ranks_ = arena.take<uint32_t>(n);
    firsts_ = arena.take<uint32_t>(n / kShare + 1);
    entries_ = arena.take<uint32_t>(DistinctKeyMap<Key>::entries_before(kMaxRanges, n));
  }

  int64_t run(const Key* keys, bool mostly_distinct, Key* unique_keys, Index* inverse,
              int64_t* counts, const ParallelFor& parallel_for) {
    ranges_ = std::min<int64_t>(parallel_for.num_threads(), kMaxRanges);
    ranges_ = std::clamp<int64_t>(n_ / kLeastRange, 1, ranges_);
    parallel_for.each(ranges_,
                      [&](int64_t range) { number_range(range, keys, mostly_distinct, inverse); });
    int64_t size = 0;
    for (int64_t range = 0; range < ranges_; ++range) {
      const int64_t range_size = numberings_[range].size();
      const int64_t shares = (range_size + kShare - 1) / kShare;
      const auto each_share = [&](auto&& body) {
        parallel_for.each(shares, [&](int64_t share) {
          const int64_t begin = begin_of(range) + share * kShare;
          body(share, begin, std::min(begin + kShare, begin_of(range) + range_size));
        });
      };
      each_share([&](int64_t share, int64_t begin, int64_t end) {
        firsts_[share] = find_before(range, begin, end, counts);
      });
      for (int64_t share = 0; share < shares; ++share) {
        size += std::exchange(firsts_[share], static_cast<uint32_t>(size));
      }
      each_share([&](int64_t share, int64_t begin, int64_t end) {
        rank_firsts(range, begin, end, firsts_[share], unique_keys, counts);
      });
    }
    parallel_for(begin_of(1), n_, kLeastRange,
                 [&](int64_t begin, int64_t end) { write_inverse(begin, end, inverse); });
    return size;
  }

 private:
  // Number of a range's distinct keys that one thread looks up at a time.
  static constexpr int64_t kShare = 2048;

  int64_t begin_of(int64_t range) const { return n_ * range / ranges_; }

  // Numbers the keys of a range. `inverse` holds these numbers until write_inverse() replaces them.
  void number_range(int64_t range, const Key* keys, bool mostly_distinct, Index* inverse) {
    const int64_t begin = begin_of(range);
    const int64_t end = begin_of(range + 1);
    uint32_t* entries = entries_ + DistinctKeyMap<Key>::entries_before(range, begin);
    DistinctKeyMap<Key> numbering(distinct_ + begin, end - begin, entries, seed_, mostly_distinct);
    numbering.add(keys, begin, end, [=](int64_t i, uint32_t number) {
      inverse[i] = static_cast<Index>(number & ~kFirst);
    });
    numberings_[range] = numbering;
  }

  // Looks up distinct keys [begin, end) of a range in the earlier ranges. A key that is found gets
  // its rank from the earlier range, and its count is added there. The other keys are new and get
  // kAbsent. Returns the number of new keys.
  uint32_t find_before(int64_t range, int64_t begin, int64_t end, int64_t* counts) {
    if (range == 0) return static_cast<uint32_t>(end - begin);
    uint32_t* ranks = ranks_ + begin;
    const Distinct<Key>* distinct = distinct_ + begin;
    numberings_[0].find(distinct, end - begin,
                        [=](int64_t i, uint32_t number) { ranks[i] = number; });
    for (int64_t before = 1; before < range; ++before) {
      const uint32_t* before_ranks = ranks_ + begin_of(before);
      numberings_[before].find(distinct, end - begin, [=](int64_t i, uint32_t number) {
        if (number != kAbsent) ranks[i] = before_ranks[number];
      });
    }
    if (counts == nullptr) {
      uint32_t absent = 0;
      for (int64_t i = 0; i < end - begin; ++i) absent += ranks[i] == kAbsent;
      return absent;
    }
    // List found keys without a branch, since the branch would be mispredicted.
    uint32_t found[kShare];
    uint32_t num_found = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      found[num_found] = static_cast<uint32_t>(i);
      num_found += ranks[i] != kAbsent;
    }
    for (uint32_t f = 0; f < num_found; ++f) counts[ranks[found[f]]] += distinct[found[f]].count;
    return static_cast<uint32_t>(end - begin) - num_found;
  }

  void rank_firsts(int64_t range, int64_t begin, int64_t end, uint32_t rank, Key* unique_keys,
                   int64_t* counts) {
    const Distinct<Key>* distinct = distinct_;
    uint32_t* ranks = ranks_;
    for (int64_t i = begin; i < end; ++i) {
      if (range > 0 && ranks[i] != kAbsent) continue;
      unique_keys[rank] = distinct[i].key;
      if (counts != nullptr) counts[rank] = distinct[i].count;
      ranks[i] = rank++;
    }
  }

  void write_inverse(int64_t begin, int64_t end, Index* inverse) const {
    for (int64_t range = 1; range < ranges_; ++range) {
      const uint32_t* ranks = ranks_ + begin_of(range);
      const int64_t stop = std::min(end, begin_of(range + 1));
#pragma GCC unroll 8
      for (int64_t i = std::max(begin, begin_of(range)); i < stop; ++i) {
        inverse[i] = static_cast<Index>(ranks[inverse[i]]);
      }
    }
  }

  int64_t n_;
  int64_t seed_;
  int64_t ranges_ = 1;
  DistinctKeyMap<Key> numberings_[kMaxRanges];
  Distinct<Key>* distinct_;  // [n] distinct keys of each range, starting at the range's start
  uint32_t* ranks_;          // [n] rank of each key of distinct_ among all distinct keys
  uint32_t* firsts_;  // [shares of a range] number of new keys, later the rank of the first new key
  uint32_t* entries_;
};

}  // namespace sparsekit::cpu
