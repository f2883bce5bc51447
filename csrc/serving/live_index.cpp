#include "serving/live_index.h"

#include <algorithm>
#include <cstring>

#include "cpu/probe.h"
#include "serving/include/sparsekit_serving.h"

namespace sparsekit::serving {
namespace {

constexpr Bucket kEmpty = {{0, 0, 0, 0, 0}, {-1, -1, -1, -1, -1}, 0};

Memory empty_buckets(int64_t num_buckets) {
  Memory memory = Memory::zeros(num_buckets * sizeof(Bucket));
  if (memory) std::fill_n(static_cast<Bucket*>(memory.data()), num_buckets, kEmpty);
  return memory;
}

}  // namespace

LiveIndex::LiveIndex(Memory memory, int64_t num_buckets, int64_t seed, int64_t num_keys)
    : memory_(std::move(memory)), num_buckets_(num_buckets), seed_(seed), num_keys_(num_keys) {}

bool LiveIndex::copy(const Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t num_keys) {
  Memory memory = Memory::zeros(num_buckets * sizeof(Bucket));
  if (!memory) return false;
  std::memcpy(memory.data(), buckets, num_buckets * sizeof(Bucket));
  *this = LiveIndex(std::move(memory), num_buckets, seed, num_keys);
  return true;
}

bool LiveIndex::reserve(int64_t more) {
  // Indexes in files have fewer keys per bucket than this limit, so that the first delta need not
  // copy the index.
  constexpr int64_t kMostPerBucket = 4;
  if (num_keys_ + more <= kMostPerBucket * num_buckets_) return true;
  const int64_t larger = std::max(sk_num_buckets(num_keys_ + more), num_buckets_ * 3 / 2);
  Memory memory = empty_buckets(larger);
  if (!memory) return false;
  auto* to = static_cast<Bucket*>(memory.data());
  int64_t copied = 0;
  for (const Bucket* bucket = buckets(); bucket < buckets() + num_buckets_; ++bucket) {
    for (int slot = 0; slot < kSlotsPerBucket && bucket->rows[slot] >= 0; ++slot) {
      const int64_t key = bucket->keys[slot];
      // The index has more keys than the file says, so it is damaged, and its keys may not fit.
      if (++copied > num_keys_) return false;
      if (!cpu::insert_absent(to, larger, home_bucket(key, seed_, larger), key,
                              bucket->rows[slot])) {
        return false;
      }
    }
  }
  *this = LiveIndex(std::move(memory), larger, seed_, copied);
  return true;
}

void LiveIndex::prefetch(int64_t key) const {
  cpu::prefetch(buckets() + home_bucket(key, seed_, num_buckets_));
}

bool LiveIndex::locate(int64_t key, int64_t* bucket, int* slot) const {
  int64_t b = home_bucket(key, seed_, num_buckets_);
  for (int64_t step = 0; step < num_buckets_; ++step) {
    const Bucket& here = buckets()[b];
    const uint32_t slots = cpu::match_slots(here, key);
    // Empty slots match key 0, too, but they follow all used slots.
    if (slots != 0 && here.rows[__builtin_ctz(slots)] >= 0) {
      *bucket = b;
      *slot = __builtin_ctz(slots);
      return true;
    }
    if (!here.passed()) return false;
    b = cpu::next_bucket(b, num_buckets_);
  }
  return false;
}

int64_t LiveIndex::find(int64_t key) const {
  int64_t bucket;
  int slot;
  return locate(key, &bucket, &slot) ? buckets()[bucket].rows[slot] : -1;
}

int64_t LiveIndex::put(int64_t key, int32_t row) {
  int64_t bucket;
  int slot;
  if (locate(key, &bucket, &slot)) {
    int32_t& at = all()[bucket].rows[slot];
    const int32_t before = at;
    at = row;
    return before;
  }
  const int64_t home = home_bucket(key, seed_, num_buckets_);
  if (!cpu::insert_absent(all(), num_buckets_, home, key, row)) return kDamaged;
  ++num_keys_;
  return -1;
}

int64_t LiveIndex::remove(int64_t key) {
  int64_t bucket;
  int slot;
  if (!locate(key, &bucket, &slot)) return -1;
  Bucket& here = all()[bucket];
  const int32_t row = here.rows[slot];
  int last = kSlotsPerBucket - 1;
  while (last > slot && here.rows[last] < 0) --last;
  here.keys[slot] = here.keys[last];
  here.rows[slot] = here.rows[last];
  here.keys[last] = 0;
  here.rows[last] = -1;
  for (int64_t b = home_bucket(key, seed_, num_buckets_); b != bucket;
       b = cpu::next_bucket(b, num_buckets_)) {
    --all()[b].spilled;
  }
  --num_keys_;
  return row;
}

}  // namespace sparsekit::serving
