#include "sparsekit/unique.h"

#include <algorithm>

#include "cpu/numbering.h"
#include "cpu/probe.h"
#include "cpu/workspace.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cpu {
namespace {

// Two ways, with the same result. By pieces: each thread numbers a range of the keys, and looks up
// what it has found in the ranges before. By parts: keys are moved to parts by their hash, and
// numbered there, in the cache; nothing is looked up twice, but there are several passes more. The
// hash table of a million distinct keys is not in a cache, which costs more than those; so many
// keys are numbered by pieces only if they repeat so often that most of them are found in what is.
constexpr int64_t kLeastPiece = 8192;
constexpr int64_t kMostInPieces = int64_t{1} << 21;
constexpr int64_t kLargeSample = 16384;
constexpr double kOftenRepeated = 0.45;  // at most this share of a large sample is distinct
constexpr int kMaxPieces = 32;
// With more threads than this, looking up distinct keys in all pieces before theirs is most of the
// work where keys seldom repeat.
constexpr int kMostPiecesOfDistinct = 4;
constexpr int64_t kLeastInParts = int64_t{1} << 17;
constexpr int64_t kLeastSampled = int64_t{1} << 16;
constexpr int64_t kPartKeys = 16384;
constexpr int kMaxParts = 256;
// The keys of a chunk are moved by one thread.
constexpr int64_t kChunkKeys = 16384;
constexpr int kMaxChunks = 64;
constexpr int64_t kSample = 2048;

// Each thread numbers a piece of the keys. Then, piece by piece, threads share out its distinct
// keys and look them up in the pieces before it, whose tables change no more; what is not there is
// new.
template <class Key, class Index>
class Pieces {
 public:
  Pieces(int64_t n, int64_t seed, Workspace workspace) : n_(n), seed_(seed) {
    distinct_ = workspace.take<Distinct<Key>>(n);
    ranks_ = workspace.take<uint32_t>(n);
    firsts_ = workspace.take<uint32_t>(n / kShare + 1);
    entries_ = workspace.take<uint32_t>(Numbering<Key>::entries_before(kMaxPieces, n));
    workspace_bytes = workspace.used();
  }

  int64_t workspace_bytes;

  int64_t run(const Key* keys, bool mostly_distinct, Key* unique_keys, Index* inverse,
              int64_t* counts, const ParallelFor& parallel_for) {
    pieces_ = std::min<int64_t>(parallel_for.num_threads(), kMaxPieces);
    pieces_ = std::clamp<int64_t>(n_ / kLeastPiece, 1, pieces_);
    parallel_for(0, pieces_, 1, [&](int64_t first, int64_t last) {
      for (int64_t piece = first; piece < last; ++piece) {
        number_piece(piece, keys, mostly_distinct, inverse);
      }
    });
    int64_t size = 0;
    for (int64_t piece = 0; piece < pieces_; ++piece) {
      const int64_t piece_size = numberings_[piece].size();
      const int64_t shares = (piece_size + kShare - 1) / kShare;
      const auto each_share = [&](auto&& body) {
        parallel_for(0, shares, 1, [&](int64_t first, int64_t last) {
          for (int64_t share = first; share < last; ++share) {
            const int64_t begin = begin_of(piece) + share * kShare;
            body(share, begin, std::min(begin + kShare, begin_of(piece) + piece_size));
          }
        });
      };
      each_share([&](int64_t share, int64_t begin, int64_t end) {
        firsts_[share] = find_before(piece, begin, end, counts);
      });
      for (int64_t share = 0; share < shares; ++share) {
        const uint32_t firsts = firsts_[share];
        firsts_[share] = static_cast<uint32_t>(size);
        size += firsts;
      }
      each_share([&](int64_t share, int64_t begin, int64_t end) {
        rank_firsts(piece, begin, end, firsts_[share], unique_keys, counts);
      });
    }
    parallel_for(begin_of(1), n_, kLeastPiece,
                 [&](int64_t begin, int64_t end) { write_inverse(begin, end, inverse); });
    return size;
  }

 private:
  // Distinct keys of a piece that one thread looks up.
  static constexpr int64_t kShare = 2048;

  int64_t begin_of(int64_t piece) const { return n_ * piece / pieces_; }

  // Numbers within the piece go to inverse for the time being.
  void number_piece(int64_t piece, const Key* keys, bool mostly_distinct, Index* inverse) {
    const int64_t begin = begin_of(piece);
    const int64_t end = begin_of(piece + 1);
    uint32_t* entries = entries_ + Numbering<Key>::entries_before(piece, begin);
    Numbering<Key> numbering(distinct_ + begin, end - begin, entries, seed_, mostly_distinct);
    numbering.add(keys, begin, end, [=](int64_t i, uint32_t number) {
      inverse[i] = static_cast<Index>(number & ~kFirst);
    });
    numberings_[piece] = numbering;
  }

  // Ranks of those distinct keys of a piece that are in one before it, to which their counts are
  // added. Those that are new get kAbsent; returns how many there are.
  uint32_t find_before(int64_t piece, int64_t begin, int64_t end, int64_t* counts) {
    if (piece == 0) return static_cast<uint32_t>(end - begin);
    uint32_t* ranks = ranks_ + begin;
    const Distinct<Key>* distinct = distinct_ + begin;
    numberings_[0].find(distinct, end - begin,
                        [=](int64_t i, uint32_t number) { ranks[i] = number; });
    for (int64_t before = 1; before < piece; ++before) {
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
    // Listed without a branch, since which are new is unpredictable.
    uint32_t found[kShare];
    uint32_t num_found = 0;
    for (int64_t i = 0; i < end - begin; ++i) {
      found[num_found] = static_cast<uint32_t>(i);
      num_found += ranks[i] != kAbsent;
    }
    for (uint32_t f = 0; f < num_found; ++f) counts[ranks[found[f]]] += distinct[found[f]].count;
    return static_cast<uint32_t>(end - begin) - num_found;
  }

  void rank_firsts(int64_t piece, int64_t begin, int64_t end, uint32_t rank, Key* unique_keys,
                   int64_t* counts) {
    const Distinct<Key>* distinct = distinct_;
    uint32_t* ranks = ranks_;
    for (int64_t i = begin; i < end; ++i) {
      if (piece > 0 && ranks[i] != kAbsent) continue;
      unique_keys[rank] = distinct[i].key;
      if (counts != nullptr) counts[rank] = distinct[i].count;
      ranks[i] = rank++;
    }
  }

  void write_inverse(int64_t begin, int64_t end, Index* inverse) const {
    for (int64_t piece = 1; piece < pieces_; ++piece) {
      const uint32_t* ranks = ranks_ + begin_of(piece);
      const int64_t stop = std::min(end, begin_of(piece + 1));
#pragma GCC unroll 8
      for (int64_t i = std::max(begin, begin_of(piece)); i < stop; ++i) {
        inverse[i] = static_cast<Index>(ranks[inverse[i]]);
      }
    }
  }

  int64_t n_;
  int64_t seed_;
  int64_t pieces_ = 1;
  Numbering<Key> numberings_[kMaxPieces];
  Distinct<Key>* distinct_;  // [n]: those of each piece from its begin on
  uint32_t* ranks_;          // [n]: for each of them, its rank among all
  uint32_t* firsts_;  // [shares of a piece]: how many keys are new, then the first one's rank
  uint32_t* entries_;
};

// Moves the keys to parts, stably, numbers each part, and turns numbers within parts into ranks
// among all: first occurrences are met in order when chunks are walked as they were moved.
template <class Key, class Index>
class Parts {
 public:
  Parts(int64_t n, int64_t seed, Workspace workspace) : n_(n), seed_(seed) {
    while (n >> bits_ > kPartKeys && 1 << bits_ < kMaxParts) ++bits_;
    parts_ = 1 << bits_;
    chunks_ = std::min<int64_t>(kMaxChunks, 1 + n / kChunkKeys);
    distinct_ = workspace.take<Distinct<Key>>(n);
    ranks_ = workspace.take<uint32_t>(n);
    numbers_ = workspace.take<uint32_t>(n);
    part_of_ = workspace.take<uint8_t>(n);
    part_keys_ = workspace.take<Key>(n);
    start_ = workspace.take<uint32_t>((chunks_ + 1) * parts_);
    firsts_ = workspace.take<uint32_t>(chunks_ * parts_);
    entries_ = workspace.take<uint32_t>(Numbering<Key>::entries_before(parts_, n));
    workspace_bytes = workspace.used();
  }

  int64_t workspace_bytes;

  int64_t run(const Key* keys, Key* unique_keys, Index* inverse, int64_t* counts,
              const ParallelFor& parallel_for) {
    const auto each_chunk = [&](auto&& body) {
      parallel_for(0, chunks_, 1, [&](int64_t begin, int64_t end) {
        for (int64_t chunk = begin; chunk < end; ++chunk) body(chunk);
      });
    };
    Key* part_keys = counts != nullptr ? reinterpret_cast<Key*>(counts) : part_keys_;
    each_chunk([&](int64_t chunk) { choose_parts(chunk, keys); });
    lay_out_parts();
    each_chunk([&](int64_t chunk) { move_keys(chunk, keys, part_keys); });
    parallel_for(0, parts_, 1, [&](int64_t begin, int64_t end) {
      // One place for the entries of all parts of a thread, so that it is in the cache.
      uint32_t* entries = entries_ + Numbering<Key>::entries_before(begin, start(0, begin));
      for (int64_t part = begin; part < end; ++part) number_part(part, part_keys, entries);
    });
    const int64_t num_unique = rank_chunks();
    each_chunk([&](int64_t chunk) { rank_firsts(chunk, unique_keys, counts); });
    parallel_for(0, parts_, 1, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) rank_part(part);
    });
    each_chunk([&](int64_t chunk) { write_inverse(chunk, inverse); });
    return num_unique;
  }

 private:
  int64_t begin_of(int64_t chunk) const { return n_ * chunk / chunks_; }

  // First key of a chunk within a part; for the chunk after the last, the part's end.
  uint32_t& start(int64_t chunk, int64_t part) { return start_[chunk * parts_ + part]; }

  void choose_parts(int64_t chunk, const Key* keys) {
    uint8_t* part_of = part_of_;  // a local, since a byte might be part of *this
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
        const uint32_t count = start(chunk, part);
        start(chunk, part) = position;
        position += count;
      }
      start(chunks_, part) = position;
    }
  }

  // Calls visit(i, part, place) for the keys of a chunk: place is where i has been moved to.
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
    Numbering<Key> numbering(distinct_ + begin, start(chunks_, part) - begin, entries, seed_);
    uint32_t* numbers = numbers_;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = numbering.size();
      numbering.add(part_keys, start(chunk, part), start(chunk + 1, part),
                    [=](int64_t i, uint32_t number) { numbers[i] = number; });
      firsts_[chunk * parts_ + part] = numbering.size() - before;
    }
  }

  // From here on firsts_[chunk * parts] is the rank of the first key that is new in the chunk.
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
      // Listed without a branch, since which keys come for the first time is unpredictable.
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
  // [n] each, those of a part from its begin on:
  Distinct<Key>* distinct_;
  uint32_t* ranks_;
  uint32_t* numbers_;  // [n], as keys were moved: numbers within the part, then ranks
  uint8_t* part_of_;   // [n]
  Key* part_keys_;     // [n], by part, where there are no counts
  uint32_t* start_;    // [chunks + 1, parts]
  uint32_t* firsts_;   // [chunks, parts]: how many keys of the part are new in the chunk
  uint32_t* entries_;
};

// Estimates the distinct count from `size` evenly spaced keys.
template <class Key>
int64_t distinct_of_sample(const Key* keys, int64_t n, int64_t size, int64_t seed,
                           void* workspace) {
  Workspace memory(workspace);
  auto* distinct = memory.take<Distinct<Key>>(size);
  auto* sample = memory.take<Key>(size);
  auto* entries = memory.take<uint32_t>(Numbering<Key>::entries_for(size));
  for (int64_t i = 0; i < size; ++i) sample[i] = keys[i * (n / size)];
  Numbering<Key> numbering(distinct, size, entries, seed);
  numbering.add(sample, 0, size, [](int64_t, uint32_t) {});
  return numbering.size();
}

// Guesses from a sample whether most keys are distinct. Of s keys drawn from m that are equally
// frequent, s * s / 2m are repeats; of n keys most are distinct if m > n.
template <class Key>
bool mostly_distinct(const Key* keys, int64_t n, int64_t seed, void* workspace) {
  const int64_t repeated = kSample - distinct_of_sample(keys, n, kSample, seed, workspace);
  return repeated * n <= kSample * kSample / 2;
}

// Decides whether to move the keys to parts.
template <class Key>
bool seldom_repeat(const Key* keys, int64_t n, int64_t seed, void* workspace) {
  return static_cast<double>(distinct_of_sample(keys, n, kLargeSample, seed, workspace)) >
         kOftenRepeated * kLargeSample;
}

}  // namespace

int64_t unique_workspace_bytes(int64_t n) {
  const int64_t pieces = Pieces<int64_t, int64_t>(n, 0, Workspace(nullptr)).workspace_bytes;
  const int64_t parts =
      n >= kLeastInParts ? Parts<int64_t, int64_t>(n, 0, Workspace(nullptr)).workspace_bytes : 0;
  return std::max(pieces, parts);
}

template <class Key, class Index>
int64_t unique(const Key* keys, int64_t n, int64_t seed, Key* unique_keys, Index* inverse,
               int64_t* counts, void* workspace, const ParallelFor& parallel_for) {
  const bool many = n > kMostInPieces;
  const bool distinct = !many && n >= kLeastSampled && mostly_distinct(keys, n, seed, workspace);
  const bool in_parts =
      many ? seldom_repeat(keys, n, seed, workspace)
           : n >= kLeastInParts && distinct && parallel_for.num_threads() > kMostPiecesOfDistinct;
  if (in_parts) {
    return Parts<Key, Index>(n, seed, Workspace(workspace))
        .run(keys, unique_keys, inverse, counts, parallel_for);
  }
  return Pieces<Key, Index>(n, seed, Workspace(workspace))
      .run(keys, distinct, unique_keys, inverse, counts, parallel_for);
}

#define SPARSEKIT_INSTANTIATE(Key, Index)                                              \
  template int64_t unique(const Key*, int64_t, int64_t, Key*, Index*, int64_t*, void*, \
                          const ParallelFor&);
SPARSEKIT_INSTANTIATE(int32_t, int64_t)
SPARSEKIT_INSTANTIATE(int64_t, int64_t)
SPARSEKIT_INSTANTIATE(int64_t, int32_t)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cpu
