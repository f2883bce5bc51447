// XXH64, the 64-bit hash of the xxHash family, after the xxHash fast digest algorithm specification
// (Y. Collet, version 0.1.1 and later).
#pragma once

#include <cstddef>
#include <cstdint>

namespace sparsekit {

// Returns the XXH64 of the `length` bytes at `data`, which needs no alignment and may be null if
// `length` is 0. Equal bytes and seeds give equal results on every machine, whatever its byte
// order. O(length); allocates nothing and is safe to call from any thread. Not a cryptographic
// hash: anyone who chooses the bytes can choose the hash.
uint64_t xxh64(const void* data, size_t length, uint64_t seed);

}  // namespace sparsekit
