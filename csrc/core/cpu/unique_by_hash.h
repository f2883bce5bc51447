// Implements unique() by partitioning the keys by their hashes.
#pragma once

#include <algorithm>
#include <utility>

#include "cpu/distinct_key_map.h"
#include "cpu/probe.h"
#include "sparsekit/arena.h"
#include "sparsekit/parallel.h"

namespace sparsekit::cpu {

constexpr int64_t kPartKeys = 16384;
constexpr int kMaxParts = 256;
// Number of keys per chunk; one thread moves the keys of a chunk.
constexpr int64_t kChunkKeys = 16384;
constexpr int kMaxChunks = 64;

// The hash-based algorithm: partitions the keys, numbers the keys of each part, and turns these
// numbers into ranks among all distinct keys. The partitioning is stable, so chunks processed in
// order contain first occurrences in order.
template <class Key, class Index>
class ByHash {
 public:
  ByHash(Arena& arena, int64_t n, int64_t seed) : n_(n), seed_(seed) {
    while (n >> bits_ > kPartKeys && 1 << bits_ < kMaxParts) ++bits_;
    parts_ = 1 << bits_;
    chunks_ = std::min<int64_t>(kMaxChunks, 1 + n / kChunkKeys);
    distinct_ = arena.take<Distinct<Key>>(n);
    ranks_ = arena.take<uint32_t>(n);
    numbers_ = arena.take<uint32_t>(n);
    part_of_ = arena.take<uint8_t>(n);
    part_keys_ = arena.take<Key>(n);
    start_ = arena.take<uint32_t>((chunks_ + 1) * parts_);
    firsts_ = arena.take<uint32_t>(chunks_ * parts_);
    entries_ = arena.take<uint32_t>(DistinctKeyMap<Key>::entries_before(parts_, n));
  }

  int64_t run(const Key* keys, Key* unique_keys, Index* inverse, int64_t* counts,
              const ParallelFor& parallel_for) {
    Key* part_keys = counts != nullptr ? reinterpret_cast<Key*>(counts) : part_keys_;
    parallel_for.each(chunks_, [&](int64_t chunk) { choose_parts(chunk, keys); });
    lay_out_parts();
    parallel_for.each(chunks_, [&](int64_t chunk) { move_keys(chunk, keys, part_keys); });
    parallel_for(0, parts_, 1, [&](int64_t begin, int64_t end) {
      // Reuse the entries of the thread's first part for all its parts, so that they stay in the
      // cache.
      uint32_t* entries = entries_ + DistinctKeyMap<Key>::entries_before(begin, start(0, begin));
      for (int64_t part = begin; part < end; ++part) number_part(part, part_keys, entries);
    });
    const int64_t num_unique = rank_chunks();
    parallel_for.each(chunks_, [&](int64_t chunk) { rank_firsts(chunk, unique_keys, counts); });
    parallel_for.each(parts_, [&](int64_t part) { rank_part(part); });
    parallel_for.each(chunks_, [&](int64_t chunk) { write_inverse(chunk, inverse); });
    return num_unique;
  }

 private:
  int64_t begin_of(int64_t chunk) const { return n_ * chunk / chunks_; }

  // Returns the position in a part where a chunk's keys begin. If `chunk` is the number of chunks,
  // returns the end of the part.
  uint32_t& start(int64_t chunk, int64_t part) { return start_[chunk * parts_ + part]; }

  void choose_parts(int64_t chunk, const Key* keys) {
    uint8_t* part_of = part_of_;  // a local copy, since byte stores may alias *this
    const int shift = 64 - bits_;
    const int64_t seed = seed_;
    const int64_t end = begin_of(chunk + 1);
    for (int64_t i = begin_of(chunk); i < end; ++i) {
      part_of[i] = static_cast<uint8_t>(hash_key(keys[i] ^ seed) >> shift);
    }
    uint32_t count[kMaxParts] = {};
    for (int64_t i = begin_of(chunk); i < end; ++i) ++count[part_of[i]];
    std::copy_n(count, parts_, &start(chunk, 0));
  }

  void lay_out_parts() {
    uint32_t position = 0;
    for (int64_t part = 0; part < parts_; ++part) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        position += std::exchange(start(chunk, part), position);
      }
      start(chunks_, part) = position;
    }
  }

  // Calls visit(i, part, place) for the keys [begin, end); `place` is the position that key i is
  // moved to.
  template <class Visit>
  void walk(int64_t begin, int64_t end, uint32_t* next, Visit&& visit) const {
    const uint8_t* part_of = part_of_;
    for (int64_t i = begin; i < end; ++i) visit(i, part_of[i], next[part_of[i]]++);
  }

  void move_keys(int64_t chunk, const Key* keys, Key* part_keys) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), parts_, next);
    walk(begin_of(chunk), begin_of(chunk + 1), next,
         [=](int64_t i, int, uint32_t place) { part_keys[place] = keys[i]; });
  }

  void number_part(int64_t part, const Key* part_keys, uint32_t* entries) {
    const uint32_t begin = start(0, part);
    DistinctKeyMap<Key> numbering(distinct_ + begin, start(chunks_, part) - begin, entries, seed_);
    uint32_t* numbers = numbers_;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = numbering.size();
      numbering.add(part_keys, start(chunk, part), start(chunk + 1, part),
                    [=](int64_t i, uint32_t number) { numbers[i] = number; });
      firsts_[chunk * parts_ + part] = numbering.size() - before;
    }
  }

  // Converts firsts_[chunk * parts_] to the rank of the chunk's first new key. Returns the number
  // of distinct keys.
  int64_t rank_chunks() {
    uint32_t rank = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = rank;
      for (int64_t part = 0; part < parts_; ++part) rank += firsts_[chunk * parts_ + part];
      firsts_[chunk * parts_] = before;
    }
    return rank;
  }

  void rank_firsts(int64_t chunk, Key* unique_keys, int64_t* counts) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), parts_, next);
    uint32_t rank = firsts_[chunk * parts_];
    constexpr int64_t kRun = 512;
    constexpr int kAhead = 16;
    uint32_t firsts[kRun + kAhead] = {};
    const uint32_t* part_begin = start_;
    const uint32_t* numbers = numbers_;
    const Distinct<Key>* distinct = distinct_;
    uint32_t* ranks = ranks_;
    for (int64_t begin = begin_of(chunk); begin < begin_of(chunk + 1); begin += kRun) {
      // List first occurrences without a branch, since the branch would be mispredicted.
      int found = 0;
      walk(begin, std::min(begin_of(chunk + 1), begin + kRun), next,
           [&](int64_t, int part, uint32_t place) {
             firsts[found] = part_begin[part] + (numbers[place] & ~kFirst);
             found += (numbers[place] & kFirst) != 0;
           });
      for (int f = 0; f < found; ++f, ++rank) {
        prefetch(&distinct[firsts[f + kAhead]]);
        unique_keys[rank] = distinct[firsts[f]].key;
        if (counts != nullptr) counts[rank] = distinct[firsts[f]].count;
        ranks[firsts[f]] = rank;
      }
    }
  }

  void rank_part(int64_t part) {
    const uint32_t* ranks = ranks_ + start(0, part);
    uint32_t* numbers = numbers_;
    const uint32_t end = start(chunks_, part);
    for (uint32_t i = start(0, part); i < end; ++i) numbers[i] = ranks[numbers[i] & ~kFirst];
  }

  void write_inverse(int64_t chunk, Index* inverse) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), parts_, next);
    const uint32_t* numbers = numbers_;
    walk(begin_of(chunk), begin_of(chunk + 1), next,
         [=](int64_t i, int, uint32_t place) { inverse[i] = static_cast<Index>(numbers[place]); });
  }

  int64_t n_;
  int64_t seed_;
  int bits_ = 1;
  int64_t parts_;
  int64_t chunks_;
  // [n] each part's distinct keys, starting at the part's first position
  Distinct<Key>* distinct_;
  uint32_t* ranks_;
  uint32_t* numbers_;  // [n] in the order of part_keys_: first numbers within the part, later ranks
  uint8_t* part_of_;   // [n] part of each key
  Key* part_keys_;     // [n] keys by part; unused if they fit in the buffer `counts`
  uint32_t* start_;    // [chunks + 1, parts], see start()
  uint32_t* firsts_;   // [chunks, parts] number of the part's keys that first occur in the chunk
  uint32_t* entries_;
};

}  // namespace sparsekit::cpu
