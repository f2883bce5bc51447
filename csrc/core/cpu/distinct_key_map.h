// Numbers distinct keys in order of first occurrence, for inputs whose distinct keys fit in the
// cache. unique() is built on this class.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/probe.h"
#include "sparsekit/hash_table.h"

namespace sparsekit::cpu {

// Flag bit: first occurrence of the key.
constexpr uint32_t kFirst = uint32_t{1} << 31;
// Sentinel: key not found.
constexpr uint32_t kAbsent = ~uint32_t{0};

// A key and its count, stored side by side since they are used together.
template <class Key>
struct Distinct {
  Key key;
  uint32_t count;
};

// A hash table of 32-bit entries. An empty entry is 0. Otherwise, the low bits hold a key's number
// plus one, and the other bits hold a tag from the key's hash. The tag rules out most other keys
// without a comparison of keys. A key goes into the first group with an empty entry, starting at
// its home group. Its position in the group is unpredictable, so all entries of a group are
// compared at once, without branches. The table grows with the number of distinct keys, so it stays
// in a faster cache if keys repeat often.
template <class Key>
class DistinctKeyMap {
 public:
  DistinctKeyMap() = default;

  // `distinct` [most] and `entries` [entries_for(most)] are buffers; `entries` must be 32-byte
  // aligned. Keys are hashed with `seed`. If mostly_distinct is true, the table has its full size
  // from the start.
  DistinctKeyMap(Distinct<Key>* distinct, int64_t most, uint32_t* entries, int64_t seed,
                 bool mostly_distinct = false)
      : distinct_(distinct), entries_(entries), most_entries_(entries_for(most)), seed_(seed) {
    while (number_bits_ < static_cast<uint64_t>(most)) number_bits_ = 2 * number_bits_ + 1;
    clear(mostly_distinct ? most_entries_ : std::min(most_entries_, kFirstEntries));
  }

  // Returns the table size for `most` distinct keys: a power of two, such that the table is at most
  // 5/8 full.
  static int64_t entries_for(int64_t most) {
    int64_t entries = 4 * kGroup;
    while (5 * entries < 8 * most) entries *= 2;
    return entries;
  }

  // Inserts the keys [begin, end) and calls visit(i, number) for each key; `number` has kFirst set
  // at first occurrences. visit may be called twice for a key, first with a wrong number; the last
  // call has the right number. `Given` is `Key` or a narrower type.
  template <class Given, class Visit>
  void add(const Given* keys, int64_t begin, int64_t end, Visit&& visit) {
    each_block([=](int64_t i) { return keys[i]; }, begin, end,
               [&](int64_t from, int count, const uint64_t* hashes) {
                 add_block(keys + from, hashes, count,
                           [&](int k, uint32_t number) { visit(from + k, number); });
               });
  }

  // Looks up the keys others [n] and calls visit(i, number) for each key, with kAbsent if the key
  // is not in the table. Does not change the table. visit may be called twice for a key, first with
  // kAbsent; the last call has the right number.
  template <class Visit>
  void find(const Distinct<Key>* others, int64_t n, Visit&& visit) const {
    each_block([=](int64_t i) { return others[i].key; }, 0, n,
               [&](int64_t from, int count, const uint64_t* hashes) {
                 find_block(others + from, hashes, count,
                            [&](int k, uint32_t number) { visit(from + k, number); });
               });
  }

  // Returns the index of the first entry used by a range of keys, given the number of preceding
  // ranges and the total number of keys in them. Each range gets at least as many entries as
  // entries_for() requires.
  static int64_t entries_before(int64_t ranges, int64_t keys) {
    return (48 * ranges + 16 * keys / 5) / 16 * 16;
  }

  // Returns the number of distinct keys so far.
  uint32_t size() const { return size_; }

 private:
  static constexpr int kGroup = 8;
  static constexpr int kBlock = 64;
  static constexpr int64_t kFirstEntries = 131072;

  // Returns a bit mask of the group's entries that match `wanted` in the bits that `mask` selects.
  static uint32_t match_group(const uint32_t* group, uint32_t mask, uint32_t wanted) {
#ifdef __AVX2__
    const __m256i entries = _mm256_load_si256(reinterpret_cast<const __m256i*>(group));
    const __m256i bits = _mm256_and_si256(entries, _mm256_set1_epi32(static_cast<int>(mask)));
    const __m256i equal = _mm256_cmpeq_epi32(bits, _mm256_set1_epi32(static_cast<int>(wanted)));
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(equal)));
#else
    uint32_t matches = 0;
    for (int i = 0; i < kGroup; ++i) {
      matches |= static_cast<uint32_t>((group[i] & mask) == wanted) << i;
    }
    return matches;
#endif
  }

  static uint32_t match_empty(const uint32_t* group) { return match_group(group, ~uint32_t{0}, 0); }

  void clear(int64_t entries) {
    last_group_ = static_cast<uint64_t>(entries / kGroup - 1);
    room_ = entries == most_entries_ ? ~uint32_t{0} : static_cast<uint32_t>(entries / 2);
    std::memset(entries_, 0, static_cast<size_t>(entries) * sizeof(uint32_t));
  }

  uint32_t* group_at(uint64_t position) const {
    return entries_ + kGroup * (position & last_group_);
  }

  // Returns a key's tag, taken from the middle of its hash, since the low bits choose the group and
  // the high bits choose the part in ByHash.
  uint32_t tag_of(uint64_t hash) const { return static_cast<uint32_t>(hash >> 24) & ~number_bits_; }

  // Calls use(position, count, hashes) for blocks of keys. While one block is in use, the groups of
  // the next block are prefetched.
  template <class KeyAt, class Use>
  void each_block(KeyAt&& key_at, int64_t begin, int64_t end, Use&& use) const {
    uint64_t hashes[2][kBlock];
    const auto request = [&](int64_t from, int to) {
      const int count = static_cast<int>(std::min<int64_t>(kBlock, end - from));
      for (int k = 0; k < count; ++k) hashes[to][k] = hash_key(key_at(from + k) ^ seed_);
      for (int k = 0; k < count; ++k) prefetch(group_at(hashes[to][k]));
    };
    request(begin, 0);
    int now = 0;
    for (int64_t from = begin; from < end; from += kBlock, now = 1 - now) {
      request(from + kBlock, 1 - now);
      use(from, static_cast<int>(std::min<int64_t>(kBlock, end - from)), hashes[now]);
    }
  }

  // Searches only the home group of each key, without branches and without a store that the next
  // lookup would have to wait for. Prefetches distinct keys but does not compare them. numbers[k]
  // becomes 0 if key k is certainly absent. Otherwise it becomes 1 plus the number of a candidate
  // to compare key k with. A key that differs from its candidate may still be in the table.
  void look_up_block(const uint64_t* hashes, int count, uint32_t* numbers) const {
    const uint32_t number_bits = number_bits_;
    const Distinct<Key>* distinct = distinct_;
    for (int k = 0; k < count; ++k) {
      const uint32_t* group = group_at(hashes[k]);
      const uint32_t matches = match_group(group, ~number_bits, tag_of(hashes[k]));
      // Without a match, take the last entry. It is either empty or holds another key.
      numbers[k] = group[__builtin_ctz(matches | 1u << (kGroup - 1))] & number_bits;
      prefetch(&distinct[numbers[k]]);
    }
  }

  // Adds a block of keys. A branch on whether a key is new is often mispredicted, so all keys are
  // first looked up without branches, then the missing keys are inserted. While nearly all keys are
  // new, the branch is predicted well, and the lookup is skipped.
  template <class Given, class Visit>
  void add_block(const Given* keys, const uint64_t* hashes, int count, Visit&& visit) {
    const uint32_t size_before = size_;
    uint64_t missing = ~uint64_t{0} >> (kBlock - count);
    if (!mostly_new_) {  // then keys have been added, so distinct_[0] exists
      uint32_t numbers[kBlock];
      look_up_block(hashes, count, numbers);
      Distinct<Key>* distinct = distinct_;
      // An absent key keeps the number 0, so it is compared with the first distinct key and found
      // to differ.
      for (int k = 0; k < count; ++k) numbers[k] -= numbers[k] != 0;
      uint64_t found = 0;
      for (int k = 0; k < count; ++k) {
        Distinct<Key>& at = distinct[numbers[k]];
        const bool same = at.key == keys[k];
        at.count += same;
        found |= static_cast<uint64_t>(same) << k;
        visit(k, numbers[k]);
      }
      missing &= ~found;
    }
    for (; missing != 0; missing &= missing - 1) {
      const int k = __builtin_ctzll(missing);
      visit(k, find_or_insert(keys[k], hashes[k]));
    }
    mostly_new_ = size_ - size_before > 3 * kBlock / 4;
  }

  template <class Visit>
  void find_block(const Distinct<Key>* others, const uint64_t* hashes, int count,
                  Visit&& visit) const {
    alignas(32) uint32_t numbers[kBlock];
    std::fill(numbers + count, numbers + kBlock, 0);
    look_up_block(hashes, count, numbers);
    uint64_t absent = 0;
    for (int k = 0; k < kBlock; k += kGroup) {
      absent |= static_cast<uint64_t>(match_empty(numbers + k)) << k;
    }
    if (absent == ~uint64_t{0}) {  // all keys are absent, which is common if keys seldom repeat
      for (int k = 0; k < count; ++k) visit(k, kAbsent);
      return;
    }
    uint64_t unsure = 0;
    for (int k = 0; k < count; ++k) {
      const uint32_t number = numbers[k] - (numbers[k] != 0);
      const bool same = distinct_[number].key == others[k].key && (absent >> k & 1) == 0;
      unsure |= static_cast<uint64_t>(!same) << k;
      visit(k, same ? number : kAbsent);
    }
    for (unsure &= ~absent; unsure != 0; unsure &= unsure - 1) {
      const int k = __builtin_ctzll(unsure);
      const auto absent_too = [](const uint32_t*, uint32_t) { return kAbsent; };
      visit(k, search(others[k].key, hashes[k], absent_too));
    }
  }

  // Returns the number of a key. If the key is not in the table, returns absent(group, empty),
  // where `group` is the first group with an empty entry and `empty` is the mask of its empty
  // entries.
  template <class Absent>
  uint32_t search(Key key, uint64_t hash, const Absent& absent) const {
    const uint32_t tag = tag_of(hash);
    for (uint64_t position = hash;; ++position) {
      uint32_t* group = group_at(position);
      const uint32_t empty = match_empty(group);
      uint32_t matches = match_group(group, ~number_bits_, tag) & ~empty;
      for (; matches != 0; matches &= matches - 1) {
        const uint32_t number = (group[__builtin_ctz(matches)] & number_bits_) - 1;
        if (distinct_[number].key == key) return number;
      }
      if (empty != 0) return absent(group, empty);
    }
  }

  uint32_t find_or_insert(Key key, uint64_t hash) {
    const uint32_t number = search(key, hash, [&](uint32_t* group, uint32_t empty) {
      distinct_[size_] = {key, 0};
      group[__builtin_ctz(empty)] = tag_of(hash) | ++size_;
      if (size_ == room_) grow();
      return (size_ - 1) | kFirst;
    });
    ++distinct_[number & ~kFirst].count;
    return number;
  }

  void grow() {
    clear(std::min(most_entries_, 4 * kGroup * static_cast<int64_t>(last_group_ + 1)));
    uint32_t number = 0;
    each_block([this](int64_t i) { return distinct_[i].key; }, 0, size_,
               [&](int64_t, int count, const uint64_t* hashes) {
                 for (int k = 0; k < count; ++k) {
                   uint64_t position = hashes[k];
                   while (match_empty(group_at(position)) == 0) ++position;
                   uint32_t* group = group_at(position);
                   group[__builtin_ctz(match_empty(group))] = tag_of(hashes[k]) | ++number;
                 }
               });
  }

  Distinct<Key>* distinct_ = nullptr;
  uint32_t* entries_ = nullptr;
  int64_t most_entries_ = 0;
  int64_t seed_ = 0;
  uint64_t last_group_ = 0;
  uint32_t number_bits_ = 0;
  uint32_t size_ = 0;
  uint32_t room_ = 0;  // number of distinct keys that makes the table grow
  bool mostly_new_ = true;
};

}  // namespace sparsekit::cpu
