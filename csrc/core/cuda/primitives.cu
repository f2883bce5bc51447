#include "cuda/primitives.h"

#include "cuda/simt.cuh"

#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#else
#include <algorithm>
#include <vector>
#endif

namespace sparsekit::cuda {

#ifdef __CUDACC__

int64_t scan_workspace_bytes(int64_t n) {
  size_t bytes = 0;
  simt::check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const int32_t*>(nullptr),
                                            static_cast<int32_t*>(nullptr), static_cast<int>(n)),
              "scan");
  return static_cast<int64_t>(bytes);
}

int64_t sort_workspace_bytes(int64_t n) {
  size_t bytes = 0;
  simt::check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, static_cast<const uint32_t*>(nullptr),
                                              static_cast<uint32_t*>(nullptr),
                                              static_cast<const int32_t*>(nullptr),
                                              static_cast<int32_t*>(nullptr), static_cast<int>(n)),
              "sort");
  return static_cast<int64_t>(bytes);
}

void exclusive_scan(const int32_t* in, int32_t* out, int64_t n, void* workspace, void* stream) {
  if (n == 0) return;
  auto bytes = static_cast<size_t>(scan_workspace_bytes(n));
  simt::check(cub::DeviceScan::ExclusiveSum(workspace, bytes, in, out, static_cast<int>(n),
                                            static_cast<cudaStream_t>(stream)),
              "scan");
}

void sort_pairs(const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t n, int bits, void* workspace, void* stream) {
  if (n == 0) return;
  auto bytes = static_cast<size_t>(sort_workspace_bytes(n));
  simt::check(cub::DeviceRadixSort::SortPairs(workspace, bytes, keys, sorted_keys, values,
                                              sorted_values, static_cast<int>(n), 0, bits,
                                              static_cast<cudaStream_t>(stream)),
              "sort");
}

#else

int64_t scan_workspace_bytes(int64_t) {
  return 0;
}

int64_t sort_workspace_bytes(int64_t) {
  return 0;
}

void exclusive_scan(const int32_t* in, int32_t* out, int64_t n, void*, void*) {
  if (n == 0) return;
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t value = in[i];
    out[i] = sum;
    sum += value;
  }
  simt::host::note(simt::host::Request::kLibrary, "scan", 4 * n, 4 * n);
}

void sort_pairs(const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t n, int bits, void*, void*) {
  if (n == 0) return;
  const auto low = [=](int64_t i) { return keys[i] & ((uint64_t{1} << bits) - 1); };
  std::vector<int64_t> order(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) order[static_cast<size_t>(i)] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return low(a) < low(b); });
  for (int64_t i = 0; i < n; ++i) {
    sorted_keys[i] = keys[order[static_cast<size_t>(i)]];
    sorted_values[i] = values[order[static_cast<size_t>(i)]];
  }
  // Counts bytes as CUB moves them: it reads the keys once to count digits of 8 bits, and moves the
  // pairs once for each digit.
  const int64_t digits = (bits + 7) / 8;
  simt::host::note(simt::host::Request::kLibrary, "sort", n * (4 + 8 * digits), n * 8 * digits);
}

#endif

}  // namespace sparsekit::cuda
