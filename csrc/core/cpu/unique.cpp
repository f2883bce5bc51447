#include "sparsekit/unique.h"

#include <algorithm>
#include <cstring>

#include "cpu/probe.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cpu {
namespace {

#ifndef PK
#define PK 32768
#endif
#ifndef BL
#define BL 32
#endif
// Up to so many keys are numbered in one go; more are split by hash into parts of about so many,
// whose scratch tables stay in the second-level cache, and which threads share out among them.
constexpr int64_t kPartKeys = PK;
constexpr int kMaxParts = 256;
// Each chunk of keys is moved to the parts by one thread.
constexpr int64_t kChunkKeys = 16384;
constexpr int kMaxChunks = 64;
constexpr int kBlock = BL;
#ifndef FS
#define FS 16384
#endif
#ifndef PF
#define PF 1000000
#endif
constexpr int64_t kLeastPiece = 8192;
constexpr int kMaxPieces = 64;
// Marks the first occurrence of a key among the numbers of a part.
constexpr uint32_t kFirst = uint32_t{1} << 31;

// A distinct key of a part.
template <class Key>
struct Distinct {
  Key key;
  uint32_t count;
  uint32_t rank;  // among those of all parts
};

constexpr int kGroup = 8;

// Bit mask of the entries of a group that are equal to `wanted` in the bits of `mask`.
inline uint32_t match_group(const uint32_t* group, uint32_t mask, uint32_t wanted) {
#ifdef __AVX2__
  const __m256i entries = _mm256_load_si256(reinterpret_cast<const __m256i*>(group));
  const __m256i bits = _mm256_and_si256(entries, _mm256_set1_epi32(static_cast<int>(mask)));
  const __m256i equal = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(static_cast<int>(wanted)));
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
#else
  uint32_t matches = 0;
  for (int i = 0; i < kGroup; ++i) matches |= uint32_t{(group[i] & mask) == wanted} << i;
  return matches;
#endif
}

// Numbers distinct keys 0, 1, ... as they come. An entry is 0 or holds a number plus one in its low
// bits and bits of the key's hash in the rest, which tell most other keys without looking at them.
// Entries are compared by groups, since which one it will be is nothing a branch could predict.
template <class Key>
class Numbering {
 public:
  // distinct [most], entries [table_entries(most)], 32-byte aligned
  Numbering(Distinct<Key>* distinct, int64_t most, uint32_t* entries)
      : distinct_(distinct), entries_(entries), most_entries_(table_entries(most)) {
    while (number_bits_ < static_cast<uint64_t>(most)) number_bits_ = 2 * number_bits_ + 1;
    clear(std::min(most_entries_, kFirstEntries));
  }

  // A power of two, of which at most 5 in 8 are in use.
  static int64_t table_entries(int64_t most) {
    int64_t entries = 4 * kGroup;
    while (5 * entries < 8 * most) entries *= 2;
    return entries;
  }

  // Calls visit(i, number) for the keys from begin to end, in order. The number of a first
  // occurrence is marked kFirst.
  template <class Visit>
  void add(const Key* keys, int64_t begin, int64_t end, Visit&& visit) {
    each_block([=](int64_t i) { return keys[i]; }, begin, end,
               [&](int64_t from, int count, const uint64_t* hashes) {
                 uint32_t numbers[kBlock];
                 number_block([=](int k) { return keys[from + k]; }, hashes, count, numbers);
                 for (int k = 0; k < count; ++k) {
                   ++distinct_[numbers[k] & ~kFirst].count;
                   visit(from + k, numbers[k]);
                 }
               });
  }

  // Adds what others have counted; numbers[i] = number of entry i.
  void merge(const Distinct<Key>* others, int64_t n, uint32_t* numbers) {
    each_block([=](int64_t i) { return others[i].key; }, 0, n,
               [&](int64_t from, int count, const uint64_t* hashes) {
                 // Copied, since new entries may take the place of these.
                 uint32_t counts[kBlock];
                 for (int k = 0; k < count; ++k) counts[k] = others[from + k].count;
                 number_block([=](int k) { return others[from + k].key; }, hashes, count,
                              numbers + from);
                 for (int k = 0; k < count; ++k) {
                   numbers[from + k] &= ~kFirst;
                   distinct_[numbers[from + k]].count += counts[k];
                 }
               });
  }

  uint32_t size() const { return size_; }

 private:
  static constexpr int64_t kFirstEntries = FS;

  void clear(int64_t entries) {
    num_entries_ = entries;
    group_mask_ = static_cast<uint64_t>(entries / kGroup - 1);
    room_ = entries == most_entries_ ? ~uint32_t{0} : static_cast<uint32_t>(entries / 2);
    std::memset(entries_, 0, static_cast<size_t>(entries) * sizeof(uint32_t));
  }

  uint32_t* group_of(uint64_t hash) const { return entries_ + kGroup * (hash & group_mask_); }
  // The hash's highest bits are alike in a part.
  uint32_t tag_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> 24) & ~number_bits_; }

  // Hashes blocks of keys, and requests their groups, a block before they are used.
  template <class KeyAt, class Use>
  void each_block(KeyAt&& key_at, int64_t begin, int64_t end, Use&& use) {
    uint64_t hashes[2][kBlock];
    const auto request = [&](int64_t from, int to) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
      for (int k = 0; k < count; ++k) hashes[to][k] = hash_key(key_at(from + k));
      for (int k = 0; k < count; ++k) prefetch(group_of(hashes[to][k]));
    };
    request(begin, 0);
    int now = 0;
    for (int64_t from = begin; from < end; from += kBlock) {
      request(from + kBlock, 1 - now);
      use(from, static_cast<int>(std::min<int64_t>(kBlock, end - from)), hashes[now]);
      now = 1 - now;
    }
  }

  // Whether a key is new is nothing a branch could predict. So all are looked up first, without a
  // branch or a store that a later lookup might depend on; then those that are missing go in.
  // Unless most of the last ones were new: then a branch does predict it.
  template <class KeyAt>
  void number_block(KeyAt&& key_at, const uint64_t* hashes, int count, uint32_t* numbers) {
    const uint32_t size_before = size_;
    if (mostly_new_) {
      for (int k = 0; k < count; ++k) numbers[k] = find_or_insert(key_at(k), hashes[k]);
    } else {
      int missing[kBlock];
      int num_missing = 0;
      const uint32_t number_bits = number_bits_;
      const Distinct<Key>* distinct = distinct_;
      for (int k = 0; k < count; ++k) {
        const uint32_t* group = group_of(hashes[k]);
        const uint32_t matches = match_group(group, ~number_bits, tag_of(hashes[k]));
        // The last entry, which is most likely empty, when there is no match.
        const uint32_t entry = group[__builtin_ctz(matches | 1u << (kGroup - 1))] & number_bits;
        const uint32_t number = entry - (entry != 0);
        numbers[k] = number;
        missing[num_missing] = k;
        num_missing += (entry == 0) | (distinct[number].key != key_at(k));
      }
      for (int m = 0; m < num_missing; ++m) {
        const int k = missing[m];
        numbers[k] = find_or_insert(key_at(k), hashes[k]);
      }
    }
    mostly_new_ = size_ - size_before > 3 * kBlock / 4;
  }

  uint32_t find_or_insert(Key key, uint64_t hash) {
    const uint32_t tag = tag_of(hash);
    for (uint64_t step = 0;; step += kGroup) {
      uint32_t* group = entries_ + ((kGroup * (hash & group_mask_) + step) & (num_entries_ - 1));
      const uint32_t empty = match_group(group, ~uint32_t{0}, 0);
      uint32_t matches = match_group(group, ~number_bits_, tag) & ~empty;
      for (; matches != 0; matches &= matches - 1) {
        const uint32_t number = (group[__builtin_ctz(matches)] & number_bits_) - 1;
        if (distinct_[number].key == key) return number;
      }
      if (empty != 0) {
        group[__builtin_ctz(empty)] = tag | (size_ + 1);
        distinct_[size_].key = key;
        distinct_[size_].count = 0;
        if (++size_ == room_) grow();
        return (size_ - 1) | kFirst;
      }
    }
  }

  void grow() {
    clear(std::min(most_entries_, 4 * num_entries_));
    uint32_t number = 0;
    each_block([this](int64_t i) { return distinct_[i].key; }, 0, size_,
               [&](int64_t, int count, const uint64_t* hashes) {
                 for (int k = 0; k < count; ++k) {
                   uint32_t* group = group_of(hashes[k]);
                   uint32_t empty = 0;
                   while ((empty = match_group(group, ~uint32_t{0}, 0)) == 0) {
                     group += kGroup;
                     if (group == entries_ + num_entries_) group = entries_;
                   }
                   group[__builtin_ctz(empty)] = tag_of(hashes[k]) | ++number;
                 }
               });
  }

  Distinct<Key>* distinct_;
  uint32_t* entries_;
  int64_t most_entries_;
  int64_t num_entries_;
  uint64_t group_mask_;
  uint32_t number_bits_ = 0;
  uint32_t size_ = 0;
  uint32_t room_;
  bool mostly_new_ = true;
};

int part_bits(int64_t n) {
  int bits = 0;
  while (n >> bits > kPartKeys && 1 << bits < kMaxParts) ++bits;
  return bits;
}

int64_t num_chunks(int64_t n) {
  return std::min<int64_t>(kMaxChunks, (n + kChunkKeys - 1) / kChunkKeys);
}

template <class Key>
class PartedUnique {
 public:
  PartedUnique(const Key* keys, int64_t n, int64_t* inverse, int64_t* counts, void* workspace)
      : keys_(keys), n_(n), bits_(part_bits(n)), num_parts_(1 << bits_), chunks_(num_chunks(n)) {
    auto* next = static_cast<char*>(workspace);
    const auto take = [&next](int64_t bytes) {
      char* taken = next;
      next += (bytes + 63) / 64 * 64;
      return static_cast<void*>(taken);
    };
    distinct_ = static_cast<Distinct<Key>*>(take(n * sizeof(Distinct<Key>)));
    numbers_ = static_cast<uint32_t*>(take(n * 4));
    start_ = static_cast<uint32_t*>(take((chunks_ + 1) * num_parts_ * 4));
    firsts_ = static_cast<uint32_t*>(take(chunks_ * num_parts_ * 4));
    part_of_ = static_cast<uint8_t*>(take(n));
    slots_ = static_cast<uint32_t*>(take(13 * n + 1024));
    part_keys_ = reinterpret_cast<Key*>(counts);
  }

  int64_t run(Key* unique_keys, int64_t* inverse, int64_t* counts,
              const ParallelFor& parallel_for) {
    const auto each_chunk = [&](auto&& body) {
      parallel_for(0, chunks_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) body(chunk);
      });
    };
    each_chunk([&](int64_t chunk) { choose_parts(chunk); });
    lay_out_parts();
    each_chunk([&](int64_t chunk) { move_keys(chunk); });
    parallel_for(0, num_parts_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) number_part(part, begin);
    });
    const int64_t num_unique = rank_chunks();
    each_chunk([&](int64_t chunk) { rank_firsts(chunk, unique_keys, counts); });
    parallel_for(0, num_parts_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) rank_part(part);
    });
    each_chunk([&](int64_t chunk) { write_inverse(chunk, inverse); });
    return num_unique;
  }

 private:
  int64_t chunk_begin(int64_t chunk) const { return n_ * chunk / chunks_; }
  // Where the keys of a chunk begin within a part.
  uint32_t& start(int64_t chunk, int64_t part) { return start_[chunk * num_parts_ + part]; }
  uint32_t part_end(int64_t part) { return start(chunks_, part); }

  void choose_parts(int64_t chunk) {
    uint32_t count[kMaxParts] = {};
    const Key* keys = keys_;
    uint8_t* part_of = part_of_;
    const int shift = 64 - bits_;
    const int64_t end = chunk_begin(chunk + 1);
    for (int64_t i = chunk_begin(chunk); i < end; ++i) {
      part_of[i] = static_cast<uint8_t>(hash_key(keys[i]) >> shift);
    }
    for (int64_t i = chunk_begin(chunk); i < end; ++i) ++count[part_of[i]];
    for (int part = 0; part < num_parts_; ++part) start(chunk, part) = count[part];
  }

  void lay_out_parts() {
    uint32_t position = 0;
    for (int part = 0; part < num_parts_; ++part) {
      for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
        const uint32_t count = start(chunk, part);
        start(chunk, part) = position;
        position += count;
      }
      start(chunks_, part) = position;
    }
  }

  void move_keys(int64_t chunk) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), num_parts_, next);
    const Key* keys = keys_;
    const uint8_t* part_of = part_of_;
    Key* part_keys = part_keys_;
    const int64_t end = chunk_begin(chunk + 1);
    for (int64_t i = chunk_begin(chunk); i < end; ++i) part_keys[next[part_of[i]]++] = keys[i];
  }

  void number_part(int64_t part, int64_t first_part) {
    const uint32_t begin = start(0, part);
    // The memory of the range's first parts serves them all, since it is in the cache.
    uint32_t* slots = slots_ + (16 * int64_t{start(0, first_part)}/5 + 32 * first_part) / 16 * 16;
    Numbering<Key> numbering(distinct_ + begin, part_end(part) - begin, slots);
    uint32_t* numbers = numbers_;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = numbering.size();
      numbering.add(part_keys_, start(chunk, part), start(chunk + 1, part),
                    [=](int64_t i, uint32_t number) { numbers[i] = number; });
      firsts_[chunk * num_parts_ + part] = numbering.size() - before;
    }
  }

  int64_t rank_chunks() {
    uint32_t rank = 0;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = rank;
      for (int part = 0; part < num_parts_; ++part) rank += firsts_[chunk * num_parts_ + part];
      firsts_[chunk * num_parts_] = before;
    }
    return rank;
  }

  void rank_firsts(int64_t chunk, Key* unique_keys, int64_t* counts) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), num_parts_, next);
    uint32_t rank = firsts_[chunk * num_parts_];
    constexpr int64_t kFirsts = 512;
    constexpr int kAhead = 16;
    uint32_t firsts[kFirsts + kAhead] = {};
    const uint8_t* part_of = part_of_;
    const uint32_t* numbers = numbers_;
    const uint32_t* part_begin = start_;
    Distinct<Key>* distinct = distinct_;
    for (int64_t block = chunk_begin(chunk); block < chunk_begin(chunk + 1); block += kFirsts) {
      const int64_t stop = std::min(chunk_begin(chunk + 1), block + kFirsts);
      int found = 0;
      for (int64_t i = block; i < stop; ++i) {
        const int part = part_of[i];
        const uint32_t number = numbers[next[part]++];
        firsts[found] = part_begin[part] + (number & ~kFirst);
        found += number >> 31;
      }
      for (int f = 0; f < found; ++f, ++rank) {
        prefetch(&distinct[firsts[f + kAhead]]);
        Distinct<Key>& first = distinct[firsts[f]];
        unique_keys[rank] = first.key;
        counts[rank] = first.count;
        first.rank = rank;
      }
    }
  }

  void rank_part(int64_t part) {
    const Distinct<Key>* distinct = distinct_ + start(0, part);
    for (uint32_t e = start(0, part); e < part_end(part); ++e) {
      numbers_[e] = distinct[numbers_[e] & ~kFirst].rank;
    }
  }

  void write_inverse(int64_t chunk, int64_t* inverse) {
    uint32_t next[kMaxParts];
    std::copy_n(&start(chunk, 0), num_parts_, next);
    const uint8_t* part_of = part_of_;
    const uint32_t* numbers = numbers_;
    const int64_t end = chunk_begin(chunk + 1);
    for (int64_t i = chunk_begin(chunk); i < end; ++i) {
      inverse[i] = numbers[next[part_of[i]]++];
    }
  }

  const Key* keys_;
  int64_t n_;
  int bits_;
  int num_parts_;
  int64_t chunks_;
  Key* part_keys_;
  uint32_t* numbers_;
  Distinct<Key>* distinct_;
  uint32_t* start_;
  uint32_t* firsts_;
  uint8_t* part_of_;
  uint32_t* slots_;
};

// Each thread numbers the keys of a piece of its own; then the distinct keys of the pieces are
// merged, in order, into those of the first.
template <class Key>
int64_t unique_by_pieces(const Key* keys, int64_t n, Key* unique_keys, int64_t* inverse,
                         int64_t* counts, void* workspace, const ParallelFor& parallel_for) {
  const int64_t pieces = std::min<int64_t>(parallel_for.num_threads(), n / kLeastPiece + 1);
  auto* distinct = static_cast<Distinct<Key>*>(workspace);             // [n]
  auto* slots = (uint32_t*)(((uint64_t)(distinct+n)+63)/64*64);            // [2 * n]
  uint32_t* ranks = slots + 16*n/5 + 64;                                     // [n]
  auto* other_slots = (uint32_t*)(((uint64_t)(ranks+n)+63)/64*64);
  const auto begin_of = [=](int64_t piece) { return n * piece / pieces; };

  Numbering<Key> all(distinct, n, slots);
  uint32_t sizes[kMaxPieces];
  parallel_for(0, pieces, 1, [&](int64_t first, int64_t last) {
    for (int64_t piece = first; piece < last; ++piece) {
      const auto number = [&](Numbering<Key>& numbering) {
        numbering.add(keys, begin_of(piece), begin_of(piece + 1),
                      [=](int64_t i, uint32_t number) { inverse[i] = number & ~kFirst; });
        sizes[piece] = numbering.size();
      };
      if (piece == 0) {
        number(all);
      } else {
        const int64_t begin = begin_of(piece);
        Numbering<Key> own(distinct + begin, begin_of(piece + 1) - begin, other_slots + (16 * begin/5 + 32 * piece)/16*16);
        number(own);
      }
    }
  });
  // Entries move towards the front only, so none is overwritten before it has been read.
  for (int64_t piece = 1; piece < pieces; ++piece) {
    all.merge(distinct + begin_of(piece), sizes[piece], ranks + begin_of(piece));
  }
  parallel_for(0, n, kLeastPiece, [&](int64_t begin, int64_t end) {
    for (int64_t piece = 1; piece < pieces; ++piece) {
      const uint32_t* rank = ranks + begin_of(piece);
      const int64_t stop = std::min(end, begin_of(piece + 1));
      for (int64_t i = std::max(begin, begin_of(piece)); i < stop; ++i) inverse[i] = rank[inverse[i]];
    }
    const int64_t stop = std::min<int64_t>(end, all.size());
    for (int64_t rank = begin; rank < stop; ++rank) {
      unique_keys[rank] = distinct[rank].key;
      counts[rank] = distinct[rank].count;
    }
  });
  return all.size();
}

}  // namespace

int64_t unique_workspace_bytes(int64_t n) {
  return n * 28 + (2 * kMaxChunks + 1) * kMaxParts * 4 + 64 * 6;
}

template <class Key>
int64_t unique(const Key* keys, int64_t n, Key* unique_keys, int64_t* inverse, int64_t* counts,
               void* workspace, const ParallelFor& parallel_for) {
  if (n > PF) {
    return PartedUnique<Key>(keys, n, inverse, counts, workspace)
        .run(unique_keys, inverse, counts, parallel_for);
  }
  return unique_by_pieces(keys, n, unique_keys, inverse, counts, workspace, parallel_for);
}

template int64_t unique(const int32_t*, int64_t, int32_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);
template int64_t unique(const int64_t*, int64_t, int64_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);

}  // namespace sparsekit::cpu
