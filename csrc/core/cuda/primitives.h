// Scans and sorts, using CUB on a device and loops in the host runner.
#pragma once

#include <cstdint>

namespace sparsekit::cuda {

// Return the workspace sizes in bytes of exclusive_scan and sort_pairs for up to n elements.
int64_t scan_workspace_bytes(int64_t n);
int64_t sort_workspace_bytes(int64_t n);

// Sets out[i] = in[0] + ... + in[i - 1] for i in [0, n). `out` may be `in`. n < 2^31.
void exclusive_scan(const int32_t* in, int32_t* out, int64_t n, void* workspace, void* stream);

// Returns the number of bits needed for sort keys up to `most`.
inline int bits_of(int64_t most) {
  int bits = 1;
  while (bits < 32 && most >> bits != 0) ++bits;
  return bits;
}

// Sorts pairs stably by the low `bits` bits of the key. The arrays must not overlap. n < 2^31.
void sort_pairs(const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t n, int bits, void* workspace, void* stream);

}  // namespace sparsekit::cuda
