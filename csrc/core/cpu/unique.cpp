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
// Marks the first occurrence of a key among the numbers of a part.
constexpr uint32_t kFirst = uint32_t{1} << 31;

// A distinct key of a part.
template <class Key>
struct Distinct {
  Key key;
  uint32_t count;
  uint32_t rank;  // among those of all parts
};

// Numbers distinct keys 0, 1, ... as they come. A slot is 0 or holds a number plus one in its low
// bits and bits of the key's hash in the rest, which tell most other keys without looking at them.
template <class Key>
class Numbering {
 public:
  // distinct [most], slots [2 * most]
  Numbering(Distinct<Key>* distinct, int64_t most, uint32_t* slots)
      : distinct_(distinct), slots_(slots), num_slots_(2 * static_cast<uint64_t>(most)) {
    std::memset(slots, 0, num_slots_ * sizeof(uint32_t));
    while (id_mask_ < static_cast<uint64_t>(most)) id_mask_ = 2 * id_mask_ + 1;
  }

  // Calls visit(i, number, is_first) for the keys from begin to end, in order.
  template <class Visit>
  void add(const Key* keys, int64_t begin, int64_t end, Visit&& visit) {
    uint64_t hashes[2][kBlock];
    request(keys, begin, end, hashes[0]);
    int now = 0;
    for (int64_t block = begin; block < end; block += kBlock) {
      request(keys, block + kBlock, end, hashes[1 - now]);
      const int64_t stop = std::min(end, block + kBlock);
      for (int64_t i = block; i < stop; ++i) {
        const uint32_t before = size_;
        const uint32_t number = number_of(keys[i], hashes[now][i - block]);
        visit(i, number, number == before);
      }
      now = 1 - now;
    }
  }

  uint32_t size() const { return size_; }

 private:
  uint64_t slot_of(uint64_t hash) const { return (hash & 0xFFFFFFFFu) * num_slots_ >> 32; }

  void request(const Key* keys, int64_t begin, int64_t end, uint64_t* hashes) const {
    const int64_t count = std::min<int64_t>(kBlock, end - begin);
    for (int64_t i = 0; i < count; ++i) hashes[i] = hash_key(keys[begin + i]);
    for (int64_t i = 0; i < count; ++i) prefetch(&slots_[slot_of(hashes[i])]);
  }

  uint32_t number_of(Key key, uint64_t hash) {
    // The hash's highest bits are alike in a part.
    const uint32_t tag = static_cast<uint32_t>(hash >> 24) & ~id_mask_;
    uint64_t slot = slot_of(hash);
    while (true) {
      const uint32_t entry = slots_[slot];
      if (entry == 0) {
        slots_[slot] = tag | (size_ + 1);
        distinct_[size_].key = key;
        distinct_[size_].count = 1;
        return size_++;
      }
      const uint32_t number = (entry & id_mask_) - 1;
      if ((entry & ~id_mask_) == tag && distinct_[number].key == key) {
        ++distinct_[number].count;
        return number;
      }
      slot = slot + 1 == num_slots_ ? 0 : slot + 1;
    }
  }

  Distinct<Key>* distinct_;
  uint32_t* slots_;
  uint64_t num_slots_;
  uint32_t id_mask_ = 0;
  uint32_t size_ = 0;
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
    slots_ = reinterpret_cast<uint32_t*>(inverse);
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
    uint32_t* slots = slots_ + 2 * int64_t{start(0, first_part)};
    Numbering<Key> numbering(distinct_ + begin, part_end(part) - begin, slots);
    uint32_t* numbers = numbers_;
    for (int64_t chunk = 0; chunk < chunks_; ++chunk) {
      const uint32_t before = numbering.size();
      numbering.add(part_keys_, start(chunk, part), start(chunk + 1, part),
                    [=](int64_t i, uint32_t number, bool first) {
                      numbers[i] = number | (first ? kFirst : 0);
                    });
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

}  // namespace

int64_t unique_workspace_bytes(int64_t n) {
  return n * 24 + (2 * kMaxChunks + 1) * kMaxParts * 4 + 64 * 6;
}

template <class Key>
int64_t unique(const Key* keys, int64_t n, Key* unique_keys, int64_t* inverse, int64_t* counts,
               void* workspace, const ParallelFor& parallel_for) {
  if (n == 0) return 0;
  if (part_bits(n) > 0) {
    return PartedUnique<Key>(keys, n, inverse, counts, workspace)
        .run(unique_keys, inverse, counts, parallel_for);
  }
  auto* distinct = static_cast<Distinct<Key>*>(workspace);
  Numbering<Key> numbering(distinct, n, reinterpret_cast<uint32_t*>(distinct + n));
  numbering.add(keys, 0, n, [=](int64_t i, uint32_t number, bool) { inverse[i] = number; });
  for (uint32_t rank = 0; rank < numbering.size(); ++rank) {
    unique_keys[rank] = distinct[rank].key;
    counts[rank] = distinct[rank].count;
  }
  return numbering.size();
}

template int64_t unique(const int32_t*, int64_t, int32_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);
template int64_t unique(const int64_t*, int64_t, int64_t*, int64_t*, int64_t*, void*,
                        const ParallelFor&);

}  // namespace sparsekit::cpu
