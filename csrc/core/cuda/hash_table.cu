#include "sparsekit/hash_table.h"

#include <cstddef>

#include "cuda/first_seen.cuh"
#include "cuda/hash_table.cuh"

namespace sparsekit::cuda {
namespace {

// Sets rows[i] to the row of keys[i], or to -1 if the key is absent. Adds the number of absent keys
// to *misses, unless `misses` is null.
template <class Key>
SPARSEKIT_KERNEL find_kernel(const Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                             const Key* keys, DeviceCount n, int64_t* rows, int64_t* misses) {
  const int64_t i = simt::global_thread();
  const bool wanted = i < n.get();
  const int32_t row = find_row(buckets, num_buckets, *seed, wanted ? int64_t{keys[i]} : 0, wanted);
  if (i < n.most) rows[i] = row;
  if (misses == nullptr) return;

  auto* in_block = simt::shared<int32_t>();
  if (simt::thread() == 0) *in_block = 0;
  simt::barrier();
  const uint32_t missing = simt::warp_ballot(wanted && row < 0);
  if (simt::lane() == 0 && missing != 0) simt::atomic_add(in_block, simt::count_bits(missing));
  simt::barrier();
  if (simt::thread() == 0 && *in_block > 0) simt::atomic_add(misses, int64_t{*in_block});
}

// Encodes a missing key's scratch slot as a negative number, so that rows[i] can hold it.
SPARSEKIT_DEVICE int64_t coded(int64_t slot) {
  return -2 - slot;
}

template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads, kEnterBlocksAtOnce)
    enter_missing_kernel(const int64_t* seed, const Key* keys, DeviceCount n, DeviceCount misses,
                         FirstSeen seen, int64_t* rows) {
  if (misses.get() == 0) return;
  const int64_t count = n.get();
  const int64_t capacity = num_slots(misses.get()), the_seed = *seed;
  for (int64_t tile = simt::block(); tile * kEnterTile < count; tile += simt::blocks()) {
    enter_tile(
        seen, capacity, the_seed, tile, [=](int64_t i) { return i < count && rows[i] < 0; },
        [=](int64_t i) { return int64_t{keys[i]}; },
        [=](int64_t i, uint32_t slot) { rows[i] = coded(slot); });
  }
}

// Decides on a single thread whether all new keys fit. The decision is made before any key is
// inserted, so a refusal changes nothing.
SPARSEKIT_KERNEL admit_kernel(FirstSeen seen, const int64_t* misses, int64_t* size,
                              int64_t capacity, int64_t slots, int64_t* status) {
  if (simt::global_thread() != 0) return;
  const int64_t before = *size, after = before + seen.ranks.total();
  status[0] = before;
  status[1] = before < 0 || before > slots ? -1 : after > capacity ? *misses : 0;
  if (status[1] == 0) *size = after;
}

// Number of keys per thread of insert_kernel; their accesses overlap.
constexpr int kInsertSteps = 4;
// Number of blocks that a multiprocessor runs at a time; ptxas limits registers to match.
constexpr int kInsertBlocksAtOnce = 5;
constexpr int kInsertThreads = 256;

// Returns a bit mask of a bucket's free slots. Other threads may be claiming some of them.
SPARSEKIT_DEVICE uint32_t free_slots(const Bucket& bucket) {
  static_assert(kSlotsPerBucket == 5 && offsetof(Bucket, rows) % 8 == 0, "two rows are a word");
  const auto* words = reinterpret_cast<const int64_t*>(simt::global(&bucket)->rows);
  const int64_t seen[] = {simt::load(words), simt::load(words + 1), simt::load(words + 2)};
  const int32_t rows[] = {low(seen[0]), high(seen[0]), low(seen[1]), high(seen[1]), low(seen[2])};
  uint32_t mask = 0;
#pragma unroll
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) mask |= uint32_t{rows[slot] < 0} << slot;
  return mask;
}

// Inserts each pending key, like insert_absent(). In each round, each of the thread's keys tries
// one slot or moves on to another bucket.
SPARSEKIT_DEVICE bool insert_all_absent(Bucket* buckets, int64_t num_buckets, int64_t seed,
                                        const int64_t (&keys)[kInsertSteps],
                                        const int64_t (&rows)[kInsertSteps],
                                        bool (&pending)[kInsertSteps], const int64_t* status) {
  int64_t b[kInsertSteps];
  uint32_t free[kInsertSteps];
  bool any = false;
#pragma unroll
  for (int j = 0; j < kInsertSteps; ++j) {
    b[j] = home_bucket(keys[j], seed, num_buckets);
    free[j] = pending[j] ? free_slots(buckets[b[j]]) : 0;
    any = any || pending[j];
  }
  for (int64_t rounds = num_buckets * (kSlotsPerBucket + 1); any; --rounds) {
    // Stop if another thread has found all buckets full.
    if (rounds == 0 || (rounds % 64 == 0 && simt::load(status) != 0)) return false;
    int32_t seen[kInsertSteps];
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      if (!pending[j] || free[j] == 0) continue;
      seen[j] = simt::atomic_cas(&buckets[b[j]].rows[simt::lowest_bit(free[j])], int32_t{-1},
                                 static_cast<int32_t>(rows[j]));
    }
    any = false;
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      if (!pending[j]) continue;
      if (free[j] == 0) {
        simt::atomic_add(&buckets[b[j]].spilled, int32_t{1});
        b[j] = b[j] + 1 == num_buckets ? 0 : b[j] + 1;
        free[j] = free_slots(buckets[b[j]]);
      } else if (seen[j] == -1) {
        buckets[b[j]].keys[simt::lowest_bit(free[j])] = keys[j];
        pending[j] = false;
      } else {
        free[j] &= free[j] - 1;
      }
      any = any || pending[j];
    }
  }
  return true;
}

template <class Key>
SPARSEKIT_KERNEL __launch_bounds__(kInsertThreads, kInsertBlocksAtOnce)
    insert_kernel(Bucket* buckets, int64_t num_buckets, const int64_t* seed, const Key* keys,
                  DeviceCount n, const int64_t* misses, FirstSeen seen, int64_t* rows,
                  int64_t* status) {
  if (*misses == 0) return;
  const int64_t size_before = status[0], count = n.get();
  const int64_t stride = simt::global_threads();
  if (simt::load(&status[1]) != 0) {  // refused
    for (int64_t i = simt::global_thread(); i < count; i += stride) {
      if (rows[i] < 0) rows[i] = -1;
    }
    return;
  }
  for (int64_t begin = simt::global_thread(); begin < count; begin += kInsertSteps * stride) {
    const auto position = [=](int step) { return begin + step * stride; };
    int64_t key[kInsertSteps], row[kInsertSteps];
    bool missing[kInsertSteps], is_first[kInsertSteps];
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      row[j] = position(j) < count ? rows[position(j)] : 0;
      missing[j] = row[j] < 0;
    }
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      is_first[j] = missing[j] && seen.ranks.is_marked(position(j));
    }
    // For the first entry of a key, the first position is known without reading the slot.
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      const bool has_come_before = missing[j] && !is_first[j];
      key[j] = is_first[j] ? int64_t{keys[position(j)]} : 0;
      row[j] = has_come_before ? seen.slots[coded(row[j])].first : is_first[j] ? position(j) : 0;
    }
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      row[j] = size_before + seen.ranks.rank(static_cast<int32_t>(row[j]));
    }
#pragma unroll
    for (int j = 0; j < kInsertSteps; ++j) {
      if (missing[j]) rows[position(j)] = row[j];
    }
    if (!insert_all_absent(buckets, num_buckets, *seed, key, row, is_first, &status[1])) {
      simt::store(&status[1], int64_t{-1});
    }
  }
}

// Clears buckets. Each lane clears a quarter of a bucket.
SPARSEKIT_KERNEL clear_buckets_kernel(Quarter* quarters, int64_t num_buckets) {
  const int64_t i = simt::global_thread();
  if (i >= num_buckets * kLanesPerKey) return;
  const int64_t quarter = i % kLanesPerKey;
  const int64_t two_rows = -1, row_and_spilled = int64_t{0xFFFFFFFF};
  quarters[i] = quarter <= 1   ? Quarter{{0, 0}}
                : quarter == 2 ? Quarter{{0, two_rows}}
                               : Quarter{{two_rows, row_and_spilled}};
}

// Writes each row's key to `keys`. Adds to *surplus the sum of the `spilled` counts of all buckets,
// minus the number of buckets that keys were moved past. In an undamaged table the difference is 0.
SPARSEKIT_KERNEL scatter_keys_kernel(const Bucket* buckets, int64_t num_buckets,
                                     const int64_t* seed, int64_t size, int64_t* keys,
                                     int64_t* surplus) {
  const int64_t i = simt::global_thread();
  if (i >= num_buckets * kSlotsPerBucket) return;
  const Bucket& bucket = buckets[i / kSlotsPerBucket];
  const int slot = static_cast<int>(i % kSlotsPerBucket);
  int64_t own = 0;
  if (slot == 0) own = bucket.spilled >= 0 ? int64_t{bucket.spilled} : int64_t{1} << 32;
  const int32_t row = bucket.rows[slot];
  if (row >= 0 && row < size) {
    const int64_t key = bucket.keys[slot];
    // Use a relaxed store, since in a damaged table two slots may have the same row.
    simt::store(&keys[row], key);
    own -= buckets_passed(i / kSlotsPerBucket, key, *seed, num_buckets);
  }
  if (own != 0) simt::atomic_add(surplus, own);
}

// Reports damage if a lookup of row i's key does not return row i. If any row has no key, or two
// keys, this happens for some i. Skips lookups in a table that is known to be damaged, since wrong
// counts could make every search very long.
SPARSEKIT_KERNEL verify_kernel(const Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                               const int64_t* keys, int64_t size, int64_t* unsound) {
  const int64_t i = simt::global_thread();
  const bool wanted = i < size && simt::load(unsound) == 0;
  const int32_t row = find_row(buckets, num_buckets, *seed, wanted ? keys[i] : 0, wanted);
  if (wanted && row != i) simt::store(unsound, int64_t{1});
}

// Inserts the key of each slot whose row is below `rows` into another table.
SPARSEKIT_KERNEL copy_keys_kernel(const Bucket* from, int64_t num_from, const int64_t* seed,
                                  int64_t rows, Bucket* to, int64_t num_to, int64_t* full) {
  const int64_t i = simt::global_thread();
  if (i >= num_from * kSlotsPerBucket) return;
  const Bucket& bucket = from[i / kSlotsPerBucket];
  const int slot = static_cast<int>(i % kSlotsPerBucket);
  const int32_t row = bucket.rows[slot];
  if (row < 0 || row >= rows) return;
  if (!insert_absent(to, num_to, *seed, bucket.keys[slot], row, full)) {
    simt::store(full, int64_t{1});
  }
}

// Renumbers and removes the keys of a bucket. Other threads may be decrementing its `spilled`
// count, but have no access to its slots.
SPARSEKIT_KERNEL renumber_kernel(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                                 const int32_t* new_rows, int64_t n, int64_t* bad_row) {
  const int64_t b = simt::global_thread();
  if (b >= num_buckets) return;
  Bucket& bucket = buckets[b];
  int32_t before[kSlotsPerBucket], after[kSlotsPerBucket];
  bool differs = false;
#pragma unroll
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) before[slot] = bucket.rows[slot];
#pragma unroll
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
    const int32_t row = before[slot];
    after[slot] = row >= 0 && row < n ? new_rows[row] : row;
    differs = differs || after[slot] != row;
  }
  if (!differs) return;
  int used = 0;
#pragma unroll
  for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
    if (before[slot] < 0) continue;
    const int64_t key = bucket.keys[slot];
    const bool is_bad = after[slot] != before[slot] && (after[slot] < -1 || after[slot] >= n);
    if (is_bad) simt::atomic_min(bad_row, int64_t{before[slot]});
    if (after[slot] >= 0 && !is_bad) {
      if (used < slot) bucket.keys[used] = key;
      bucket.rows[used++] = after[slot];
      continue;
    }
    for (int64_t passed = home_bucket(key, *seed, num_buckets); passed != b;
         passed = passed + 1 == num_buckets ? 0 : passed + 1) {
      simt::atomic_add(&buckets[passed].spilled, int32_t{-1});
    }
  }
  for (; used < kSlotsPerBucket; ++used) {
    bucket.keys[used] = 0;
    bucket.rows[used] = -1;
  }
}

struct InsertWorkspace {
  int64_t* misses;
  FirstSeen seen;

  InsertWorkspace(Arena& arena, int64_t n) : misses(arena.take<int64_t>(1)), seen(arena, n) {}
};

}  // namespace

void hash_table_clear(Bucket* buckets, int64_t num_buckets, void* stream) {
  simt::launch("hash_table: clear", clear_buckets_kernel,
               simt::grid_for(num_buckets * kLanesPerKey), stream,
               reinterpret_cast<Quarter*>(buckets), num_buckets);
}

template <class Key>
void hash_table_find(const Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                     const Key* keys, DeviceCount n, int64_t* rows, void* stream) {
  int64_t* const no_count = nullptr;
  simt::launch("hash_table: find", find_kernel<Key>, simt::grid_for(n.most), stream, buckets,
               num_buckets, seed, keys, n, rows, no_count);
}

int64_t hash_table_find_or_insert_workspace_bytes(int64_t n) {
  return Arena::bytes_of<InsertWorkspace>(n);
}

template <class Key>
void hash_table_find_or_insert(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                               int64_t* size, int64_t capacity, const Key* keys, DeviceCount n,
                               int64_t* rows, int64_t* status, void* workspace, void* stream) {
  Arena arena(workspace);
  const InsertWorkspace work(arena, n.most);
  const DeviceCount misses{n.most, work.misses};
  simt::fill_bytes(work.misses, 0, sizeof(int64_t), stream);
  simt::Grid grid = simt::grid_for(n.most);
  grid.shared_bytes = sizeof(int32_t);
  simt::launch("hash_table: find", find_kernel<Key>, grid, stream, buckets, num_buckets, seed, keys,
               n, rows, work.misses);
  // Size the scratch table on the device, since only the device knows the number of misses.
  clear_first_seen(work.seen, misses, stream);
  simt::launch("hash_table: enter", enter_missing_kernel<Key>, enter_grid(n.most), stream, seed,
               keys, n, misses, work.seen, rows);
  rank_first_seen(work.seen, stream);
  simt::launch("hash_table: admit", admit_kernel, simt::Grid{1, simt::kWarp}, stream, work.seen,
               work.misses, size, capacity, num_buckets * kSlotsPerBucket, status);
  simt::launch("hash_table: insert", insert_kernel<Key>,
               simt::strided_grid_for((n.most + kInsertSteps - 1) / kInsertSteps, kInsertThreads),
               stream, buckets, num_buckets, seed, keys, n, work.misses, work.seen, rows, status);
}

void hash_table_keys(const Bucket* buckets, int64_t num_buckets, const int64_t* seed, int64_t size,
                     int64_t* keys, int64_t* unsound, void* stream) {
  simt::fill_bytes(unsound, 0, sizeof(int64_t), stream);
  simt::fill_bytes(keys, 0, size * static_cast<int64_t>(sizeof(int64_t)), stream);
  simt::launch("hash_table: keys", scatter_keys_kernel,
               simt::grid_for(num_buckets * kSlotsPerBucket), stream, buckets, num_buckets, seed,
               size, keys, unsound);
  simt::launch("hash_table: verify", verify_kernel, simt::grid_for(size), stream, buckets,
               num_buckets, seed, keys, size, unsound);
}

void hash_table_copy(const Bucket* from, int64_t num_from, const int64_t* seed, int64_t rows,
                     Bucket* to, int64_t num_to, int64_t* full, void* stream) {
  simt::fill_bytes(full, 0, sizeof(int64_t), stream);
  simt::launch("hash_table: copy", copy_keys_kernel, simt::grid_for(num_from * kSlotsPerBucket),
               stream, from, num_from, seed, rows, to, num_to, full);
}

void hash_table_renumber(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                         const int32_t* new_rows, int64_t n, int64_t* bad_row, void* stream) {
  simt::launch("hash_table: renumber", renumber_kernel, simt::grid_for(num_buckets), stream,
               buckets, num_buckets, seed, new_rows, n, bad_row);
}

template decltype(hash_table_find<int32_t>) hash_table_find<int32_t>;
template decltype(hash_table_find<int64_t>) hash_table_find<int64_t>;
template decltype(hash_table_find_or_insert<int32_t>) hash_table_find_or_insert<int32_t>;
template decltype(hash_table_find_or_insert<int64_t>) hash_table_find_or_insert<int64_t>;

}  // namespace sparsekit::cuda
