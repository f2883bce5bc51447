// Changes an index at random, and compares it with a map after each series of steps. The counts of
// keys that have passed a bucket must be exact: too large ones would make searches long for ever.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <unordered_map>
#include <vector>

#include "cpu/probe.h"
#include "serving/include/sparsekit_serving.h"
#include "serving/live_index.h"
#include "serving/spare_rows.h"

using namespace sparsekit;
using namespace sparsekit::serving;

namespace {

constexpr int64_t kSeed = 99;

[[noreturn]] void die(const char* what, int64_t key) {
  std::fprintf(stderr, "%s: key %lld\n", what, static_cast<long long>(key));
  std::exit(1);
}

// Checks all that lookups rely on.
void check(const LiveIndex& index, const std::unordered_map<int64_t, int32_t>& map) {
  const Bucket* buckets = index.buckets();
  const int64_t n = index.num_buckets();
  std::vector<int64_t> passed(n);
  int64_t keys = 0;
  for (int64_t b = 0; b < n; ++b) {
    bool ended = false;
    for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
      const bool used = buckets[b].rows[slot] >= 0;
      if (used && ended) die("a used slot behind an empty one", buckets[b].keys[slot]);
      if (!used && buckets[b].keys[slot] != 0) die("an empty slot with a key", b);
      ended |= !used;
      if (!used) continue;
      ++keys;
      const int64_t key = buckets[b].keys[slot];
      for (int64_t at = home_bucket(key, kSeed, n); at != b; at = cpu::next_bucket(at, n)) {
        ++passed[at];
      }
    }
  }
  if (keys != index.num_keys() || keys != static_cast<int64_t>(map.size())) die("a number", keys);
  for (int64_t b = 0; b < n; ++b) {
    if (buckets[b].spilled != passed[b]) die("a wrong count in bucket", b);
  }
  for (const auto& [key, row] : map) {
    if (index.find(key) != row) die("a wrong row", key);
  }
}

void change(uint64_t seed) {
  std::mt19937_64 random(seed);
  std::unordered_map<int64_t, int32_t> map;
  std::vector<int64_t> keys;
  const auto draw = [&] {
    // Few different keys, so that most steps meet one that is there; 0 is what empty slots have.
    return static_cast<int64_t>(random() % 400) * static_cast<int64_t>(1 + seed % 3) - 200;
  };
  for (int i = 0; i < 60; ++i) {
    const int64_t key = draw();
    if (map.emplace(key, static_cast<int32_t>(keys.size())).second) keys.push_back(key);
  }
  const auto n = static_cast<int64_t>(keys.size());
  std::vector<Bucket> buckets(sk_num_buckets(n));
  const auto num_buckets = static_cast<int64_t>(buckets.size());
  if (sk_build_index(keys.data(), n, kSeed, buckets.data(), num_buckets)) die("no index", 0);
  LiveIndex index;
  if (!index.copy(buckets.data(), num_buckets, kSeed, n)) die("no memory", 0);
  for (int series = 0; series < 40; ++series) {
    if (!index.reserve(30)) die("no room", series);
    for (int step = 0; step < 30; ++step) {
      const int64_t key = draw();
      const auto found = map.find(key);
      const int64_t before = found == map.end() ? -1 : found->second;
      if (random() % 3 != 0) {
        const auto row = static_cast<int32_t>(random() % 1000000);
        if (index.put(key, row) != before) die("put returns another row", key);
        map[key] = row;
      } else {
        if (index.remove(key) != before) die("remove returns another row", key);
        map.erase(key);
      }
    }
    check(index, map);
  }
}

// Rows that are handed out are not in use, and have memory.
void hand_out() {
  constexpr int64_t kBytes = 24, kFirst = 171, kMost = 300000;
  const size_t bytes = (kMost * kBytes + 4096) / 4096 * 4096;
  void* memory = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  SpareRows spare(static_cast<uint8_t*>(memory), kBytes, kFirst, kMost, false);
  std::vector<bool> in_use(kMost);
  std::vector<int32_t> taken;
  std::mt19937_64 random(1);
  for (uint32_t batch = 1; batch < 60; ++batch) {
    const int64_t count = static_cast<int64_t>(random() % 20000);
    if (spare.reserve(count) == SpareRows::Room::kFull) {
      if (spare.in_use() + count <= kMost - kFirst) die("full too early", batch);
      spare.give_back(taken);
      spare.give_back(taken);  // twice does no harm
      for (const int32_t row : taken) in_use[row] = false;
      taken.clear();
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int32_t row = spare.take(batch);
      if (row < kFirst || row >= spare.limit() || in_use[row]) die("a bad row", row);
      in_use[row] = true;
      for (int64_t b = 0; b < kBytes; ++b) spare.at(row)[b] = 1;
      taken.push_back(row);
    }
    if (spare.in_use() != static_cast<int64_t>(taken.size())) die("a wrong number of rows", batch);
  }
  spare.give_back(
      {0, kFirst - 1, static_cast<int32_t>(kMost - 1), -1});  // those of the file, or none
}

}  // namespace

int main() {
  for (uint64_t seed = 0; seed < 30; ++seed) change(seed);
  hand_out();
  std::puts("ok");
}
