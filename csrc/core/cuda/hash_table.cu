#include "sparsekit/hash_table.h"

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

// Encodes the scratch slot of a missing key as a negative number, so that rows[i] can hold it.
SPARSEKIT_DEVICE int64_t coded(int64_t slot) {
  return -2 - slot;
}

template <class Key>
SPARSEKIT_KERNEL enter_missing_kernel(const int64_t* seed, const Key* keys, DeviceCount n,
                                      DeviceCount misses, FirstSeen seen, int64_t* rows) {
  if (misses.get() == 0) return;
  const int64_t count = n.get();
  const int64_t capacity = num_slots(misses.get());
  for (int64_t first = simt::global_thread() - simt::lane(); first < count;
       first += simt::global_threads()) {
    const int64_t i = first + simt::lane();
    const bool missing = i < count && rows[i] < 0;
    const int64_t slot = missing ? enter_key(seen.slots, capacity, *seed, keys[i]) : -1;
    if (missing) rows[i] = coded(slot);
    count_key(seen.slots, slot, static_cast<int32_t>(i));
  }
}

// Decides whether all new keys fit, on a single thread. The decision is made before any key is
// inserted, so a refusal changes nothing.
SPARSEKIT_KERNEL admit_kernel(FirstSeen seen, const int64_t* misses, int64_t* size,
                              int64_t capacity, int64_t slots, int64_t* status) {
  if (simt::global_thread() != 0) return;
  const int64_t before = *size, after = before + seen.ranks.total();
  status[0] = before;
  status[1] = before < 0 || before > slots ? -1 : after > capacity ? *misses : 0;
  if (status[1] == 0) *size = after;
}

template <class Key>
SPARSEKIT_KERNEL insert_kernel(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                               const Key* keys, DeviceCount n, const int64_t* misses,
                               FirstSeen seen, int64_t* rows, int64_t* status) {
  if (*misses == 0) return;
  const bool refused = simt::load(&status[1]) != 0;
  const int64_t size_before = status[0];
  for (int64_t i = simt::global_thread(); i < n.get(); i += simt::global_threads()) {
    if (rows[i] >= 0) continue;
    if (refused) {
      rows[i] = -1;
      continue;
    }
    const Slot slot = seen.slots[coded(rows[i])];
    const int64_t row = size_before + seen.ranks.rank(slot.first);
    rows[i] = row;
    if (slot.first == i && !insert_absent(buckets, num_buckets, *seed, keys[i],
                                          static_cast<int32_t>(row), &status[1])) {
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
// minus the number of buckets that keys have passed. In a sound table the difference is 0.
SPARSEKIT_KERNEL scatter_keys_kernel(const Bucket* buckets, int64_t num_buckets,
                                     const int64_t* seed, int64_t size, int64_t* keys,
                                     int64_t* surplus) {
  const int64_t i = simt::global_thread();
  if (i >= num_buckets * kSlotsPerBucket) return;
  const Bucket& bucket = buckets[i / kSlotsPerBucket];
  const int slot = static_cast<int>(i % kSlotsPerBucket);
  int64_t own = 0;
  if (slot == 0 && bucket.spilled != 0) own = bucket.passed() ? bucket.spilled : int64_t{1} << 32;
  const int32_t row = bucket.rows[slot];
  if (row >= 0 && row < size) {
    const int64_t key = bucket.keys[slot];
    // Use a relaxed store, since in a damaged table two slots may have the same row.
    simt::store(&keys[row], key);
    own -= buckets_passed(i / kSlotsPerBucket, key, *seed, num_buckets);
  }
  if (own != 0) simt::atomic_add(surplus, own);
}

// Reports damage if the lookup of row i's key did not return row i. If any row has no key, or two
// keys, this happens for some i.
SPARSEKIT_KERNEL verify_kernel(const int64_t* rows, int64_t size, int64_t* unsound) {
  const int64_t i = simt::global_thread();
  if (i < size && rows[i] != i) simt::store(unsound, int64_t{1});
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
  simt::launch("hash_table: enter", enter_missing_kernel<Key>, simt::strided_grid_for(n.most),
               stream, seed, keys, n, misses, work.seen, rows);
  rank_first_seen(work.seen, misses, stream);
  simt::launch("hash_table: admit", admit_kernel, simt::Grid{1, simt::kWarp}, stream, work.seen,
               work.misses, size, capacity, num_buckets * kSlotsPerBucket, status);
  simt::launch("hash_table: insert", insert_kernel<Key>, simt::strided_grid_for(n.most), stream,
               buckets, num_buckets, seed, keys, n, work.misses, work.seen, rows, status);
}

void hash_table_keys(const Bucket* buckets, int64_t num_buckets, const int64_t* seed, int64_t size,
                     int64_t* keys, int64_t* rows, int64_t* unsound, void* stream) {
  simt::fill_bytes(unsound, 0, sizeof(int64_t), stream);
  simt::fill_bytes(keys, 0, size * static_cast<int64_t>(sizeof(int64_t)), stream);
  simt::launch("hash_table: keys", scatter_keys_kernel,
               simt::grid_for(num_buckets * kSlotsPerBucket), stream, buckets, num_buckets, seed,
               size, keys, unsound);
  hash_table_find(buckets, num_buckets, seed, keys, DeviceCount{size}, rows, stream);
  simt::launch("hash_table: verify", verify_kernel, simt::grid_for(size), stream, rows, size,
               unsound);
}

template decltype(hash_table_find<int32_t>) hash_table_find<int32_t>;
template decltype(hash_table_find<int64_t>) hash_table_find<int64_t>;
template decltype(hash_table_find_or_insert<int32_t>) hash_table_find_or_insert<int32_t>;
template decltype(hash_table_find_or_insert<int64_t>) hash_table_find_or_insert<int64_t>;

}  // namespace sparsekit::cuda
