// A hash table that maps int64 keys to dense row indices.
#pragma once

#include <cstdint>

#include "sparsekit/device_count.h"
#include "sparsekit/host_device.h"
#include "sparsekit/parallel.h"

namespace sparsekit {

constexpr int kSlotsPerBucket = 5;

// A bucket fills one cache line of 64 bytes, and most lookups read nothing else. A slot is empty if
// its row is -1, so any int64 may be a key; the key of an empty slot is 0. Used slots come first.
struct Bucket {
  int64_t keys[kSlotsPerBucket];
  int32_t rows[kSlotsPerBucket];
  // Number of keys in the table that were moved past this bucket because it was full. If it is 0, a
  // search ends here.
  int32_t spilled;

  // Returns true if a search that reaches this bucket must continue in the next one. The bucket may
  // have free slots: removing one of its keys does not move back the keys that were moved past it.
  SPARSEKIT_HOST_DEVICE bool passed() const { return spilled > 0; }
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

// Mixes every bit of the key into the high bits, which home_bucket() uses. Has two rounds of
// multiply and xor-shift, with the constants of the splitmix64 finaliser (Steele, Lea and Flood
// 2014). Colliding keys are easy to construct, so keys from outside are hashed as key ^ seed with a
// random seed (docs/design/hashing.md discusses how much protection this gives).
SPARSEKIT_HOST_DEVICE inline uint64_t hash_key(int64_t key) {
  uint64_t x = static_cast<uint64_t>(key);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

// Returns the bucket where the search for a key starts. Scales the hash to [0, num_buckets) by
// multiply-high, so that the number of buckets need not be a power of two.
SPARSEKIT_HOST_DEVICE inline int64_t bucket_of_hash(uint64_t hash, int64_t num_buckets) {
  __extension__ using uint128 = unsigned __int128;
  return static_cast<int64_t>((static_cast<uint128>(hash) * static_cast<uint64_t>(num_buckets)) >>
                              64);
}

SPARSEKIT_HOST_DEVICE inline int64_t home_bucket(int64_t key, int64_t seed, int64_t num_buckets) {
  return bucket_of_hash(hash_key(key ^ seed), num_buckets);
}

// Returns the distance of bucket `b` from the home bucket of `key`.
SPARSEKIT_HOST_DEVICE inline int64_t buckets_passed(int64_t b, int64_t key, int64_t seed,
                                                    int64_t num_buckets) {
  const int64_t distance = b - home_bucket(key, seed, num_buckets);
  return distance < 0 ? distance + num_buckets : distance;
}

namespace cpu {

// Empties all buckets.
void hash_table_clear(Bucket* buckets, int64_t num_buckets, const ParallelFor& parallel_for);

// Sets rows[i] to the row of keys[i], or to -1 if the key is absent. Key and Row are int32_t or
// int64_t. `seed` must be the seed used to insert the keys.
template <class Key, class Row>
void hash_table_find(const Bucket* buckets, int64_t num_buckets, int64_t seed, const Key* keys,
                     int64_t n, Row* rows, const ParallelFor& parallel_for);

// Like hash_table_find, but inserts absent keys with the rows *size, *size + 1, ... in order of
// first occurrence, and increases *size. Returns 0 on success. If the rows would exceed `capacity`,
// no key is inserted, and the table and *size stay unchanged, byte for byte. Then rows[i] is -1 for
// absent keys, and the call returns the number of absent entries in `keys`, including repeats.
// Returns -1 if the table is damaged, for example if it was loaded from a bad file: no slot is free
// although *size is below `capacity`. Precondition: capacity <= kSlotsPerBucket * num_buckets and
// capacity < 2^31.
template <class Key>
int64_t hash_table_find_or_insert(Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t* size,
                                  int64_t capacity, const Key* keys, int64_t n, int64_t* rows,
                                  const ParallelFor& parallel_for);

// Writes keys[row] = key for every key in the table whose row is below `size`. rows [size] is
// workspace. Returns false if the table is damaged, that is, if it does not have exactly one key
// for each row, or if its counts of spilled keys do not match its keys; `keys` is then undefined.
bool hash_table_keys(const Bucket* buckets, int64_t num_buckets, int64_t seed, int64_t size,
                     int64_t* keys, int64_t* rows, const ParallelFor& parallel_for);

// Copies the keys whose rows are below `rows` from the buckets `from` to another table, `to`, with
// the same rows. `to` must not contain any of these keys. `from` may be part of a table's buckets.
// Returns false if `to` has no free slot. Buckets are in hash order, so both tables are accessed
// from one end to the other. Precondition: both tables have the same seed.
bool hash_table_copy(const Bucket* from, int64_t num_from, int64_t seed, int64_t rows, Bucket* to,
                     int64_t num_to);

// Gives the key of each row r in [0, n) the row new_rows[r], or removes the key if that is -1. The
// caller sets the table's size. Returns -1, or the first position in new_rows of a value outside
// [-1, n); then nothing has been changed. Rows >= n, which only a damaged table has, are kept.
int64_t hash_table_renumber(Bucket* buckets, int64_t num_buckets, int64_t seed,
                            const int32_t* new_rows, int64_t n, const ParallelFor& parallel_for);

}  // namespace cpu

// On a device, all pointers (including `seed`) point to device memory, and `stream` is a
// cudaStream_t. The host never waits for the device.
namespace cuda {

void hash_table_clear(Bucket* buckets, int64_t num_buckets, void* stream);

// Like the CPU version, but rows[i] is -1 for i >= n.get().
template <class Key>
void hash_table_find(const Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                     const Key* keys, DeviceCount n, int64_t* rows, void* stream);

int64_t hash_table_find_or_insert_workspace_bytes(int64_t n);

// Like the CPU version. status[0] becomes the size before the call. status[1] becomes 0 on success,
// the number of refused entries, or -1 if the table is damaged, that is, if *size is out of range
// or no slot was free. If no slot was free, the table is unusable afterwards.
template <class Key>
void hash_table_find_or_insert(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                               int64_t* size, int64_t capacity, const Key* keys, DeviceCount n,
                               int64_t* rows, int64_t* status, void* workspace, void* stream);

// Like the CPU version. *unsound becomes nonzero if the table is damaged, otherwise 0.
void hash_table_keys(const Bucket* buckets, int64_t num_buckets, const int64_t* seed, int64_t size,
                     int64_t* keys, int64_t* unsound, void* stream);

// Like the CPU version. *full becomes nonzero if `to` has no free slot, otherwise 0.
void hash_table_copy(const Bucket* from, int64_t num_from, const int64_t* seed, int64_t rows,
                     Bucket* to, int64_t num_to, int64_t* full, void* stream);

// Like the CPU version, but removes keys whose new row is outside [-1, n), and sets *bad_row to the
// first position of such a value.
void hash_table_renumber(Bucket* buckets, int64_t num_buckets, const int64_t* seed,
                         const int32_t* new_rows, int64_t n, int64_t* bad_row, void* stream);

}  // namespace cuda
}  // namespace sparsekit
