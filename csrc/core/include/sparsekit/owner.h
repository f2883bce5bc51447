// Maps keys to the ranks that own them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "sparsekit/host_device.h"

namespace sparsekit {

// Maximum number of ranks.
constexpr int64_t kMaxWorldSize = 2048;

// Number of virtual shards that keys are hashed to. A map assigns each shard to a rank.
constexpr int64_t kVirtualShards = int64_t{1} << 16;

// Returns the virtual shard of a key. An int32 key has the same shard as an int64 key with the same
// value. Saved tables are divided among ranks by virtual shard, so a key's shard must be the same
// on all ranks and in all versions. The hash is the finaliser of MurmurHash3 (Appleby). hash_key()
// (hash_table.h) must not be used here: all keys of a rank would then have the same leading bits,
// and would fill only some of the rank's buckets.
SPARSEKIT_HOST_DEVICE inline int64_t virtual_shard_of(int64_t key) {
  uint64_t x = static_cast<uint64_t>(key);
  x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCDu;
  x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53u;
  // Omit the finaliser's last step, x ^ (x >> 33), which would not change these bits.
  return static_cast<int64_t>(x >> 48);
}

// An assignment of keys to world_size ranks; world_size is in [1, kMaxWorldSize].
struct Owners {
  const int16_t* map = nullptr;  // [kVirtualShards] ranks; if null, unsigned key modulo world_size
  uint64_t world_size = 1;
  uint64_t reciprocal = ~uint64_t{0};  // 2^64 / world_size, rounded down, or one less

  Owners() = default;
  Owners(const int16_t* ranks, int64_t num_ranks)
      : map(ranks),
        world_size(static_cast<uint64_t>(num_ranks)),
        reciprocal(~uint64_t{0} / world_size) {}
};
static_assert(std::is_trivially_copyable_v<Owners>, "kernels take arrays of them");

// Returns unsigned(key) % world_size. Uses a multiplication, which is faster than a division.
SPARSEKIT_HOST_DEVICE inline int64_t owner_by_modulo(int64_t key, const Owners& owners) {
  __extension__ using uint128 = unsigned __int128;
  const auto unsigned_key = static_cast<uint64_t>(key);
  // This estimate is the exact quotient or one less.
  const auto quotient =
      static_cast<uint64_t>((static_cast<uint128>(unsigned_key) * owners.reciprocal) >> 64);
  const uint64_t rest = unsigned_key - quotient * owners.world_size;
  return static_cast<int64_t>(rest < owners.world_size ? rest : rest - owners.world_size);
}

// Returns the rank that owns a key. Does not check the map's values: code that receives a map from
// outside checks that they are valid ranks.
SPARSEKIT_HOST_DEVICE inline int64_t owner_of(int64_t key, const Owners& owners) {
  return owners.map == nullptr ? owner_by_modulo(key, owners) : owners.map[virtual_shard_of(key)];
}

}  // namespace sparsekit
