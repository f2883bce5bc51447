#include "cuda/primitives.h"

#include "cuda/simt.cuh"

#ifdef __CUDACC__
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>
#else
#include <algorithm>
#include <numeric>
#include <vector>
#endif

#include <stdexcept>
#include <string>

namespace sparsekit::cuda {
namespace {

// CUB expects the number of elements as a 32-bit integer.
int checked(int64_t n) {
  if (n > INT32_MAX) {
    throw std::runtime_error("sparsekit: a scan or sort of " + std::to_string(n) +
                             " elements; at most 2^31 - 1 are supported");
  }
  return static_cast<int>(n);
}

}  // namespace

#ifdef __CUDACC__

int64_t scan_workspace_bytes(int64_t n) {
  size_t bytes = 0;
  simt::check(cub::DeviceScan::ExclusiveSum(nullptr, bytes, static_cast<const int32_t*>(nullptr),
                                            static_cast<int32_t*>(nullptr), checked(n)),
              "scan");
  return static_cast<int64_t>(bytes);
}

int64_t sort_workspace_bytes(int64_t n) {
  size_t bytes = 0;
  simt::check(cub::DeviceRadixSort::SortPairs(nullptr, bytes, static_cast<const uint32_t*>(nullptr),
                                              static_cast<uint32_t*>(nullptr),
                                              static_cast<const int32_t*>(nullptr),
                                              static_cast<int32_t*>(nullptr), checked(n)),
              "sort");
  return static_cast<int64_t>(bytes);
}

void exclusive_scan(const int32_t* in, int32_t* out, int64_t n, void* workspace, void* stream) {
  if (n == 0) return;
  auto bytes = static_cast<size_t>(scan_workspace_bytes(n));
  simt::check(cub::DeviceScan::ExclusiveSum(workspace, bytes, in, out, checked(n),
                                            static_cast<cudaStream_t>(stream)),
              "scan");
}

void sort_pairs(const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t n, int bits, void* workspace, void* stream) {
  if (n == 0) return;
  auto bytes = static_cast<size_t>(sort_workspace_bytes(n));
  simt::check(
      cub::DeviceRadixSort::SortPairs(workspace, bytes, keys, sorted_keys, values, sorted_values,
                                      checked(n), 0, bits, static_cast<cudaStream_t>(stream)),
      "sort");
}

#else

int64_t scan_workspace_bytes(int64_t n) {
  checked(n);
  return 0;
}

int64_t sort_workspace_bytes(int64_t n) {
  checked(n);
  return 0;
}

void exclusive_scan(const int32_t* in, int32_t* out, int64_t n, void*, void*) {
  if (n == 0) return;
  if (simt::host::is_recording()) {
    return simt::host::record([=] { exclusive_scan(in, out, n, nullptr, nullptr); });
  }
  int32_t sum = 0;
  for (int64_t i = 0; i < (simt::host::only_plans() ? 0 : n); ++i) {
    const int32_t value = in[i];
    out[i] = sum;
    sum += value;
  }
  constexpr int64_t kOperations = 2;  // CUB 3.0 has a kernel that sets up state and one that scans
  simt::host::note(simt::host::Request::kLibrary, "scan", 4 * n, 4 * n, kOperations);
}

void sort_pairs(const uint32_t* keys, uint32_t* sorted_keys, const int32_t* values,
                int32_t* sorted_values, int64_t n, int bits, void*, void*) {
  if (n == 0) return;
  if (simt::host::is_recording()) {
    return simt::host::record(
        [=] { sort_pairs(keys, sorted_keys, values, sorted_values, n, bits, nullptr, nullptr); });
  }
  const auto low = [=](int64_t i) { return keys[i] & ((uint64_t{1} << bits) - 1); };
  std::vector<int64_t> order(static_cast<size_t>(simt::host::only_plans() ? 0 : n));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return low(a) < low(b); });
  for (size_t i = 0; i < order.size(); ++i) {
    sorted_keys[i] = keys[order[i]];
    sorted_values[i] = values[order[i]];
  }
  // Count the operations and bytes of CUB's sort. It reads the keys once to count 8-bit digits, and
  // moves the pairs once for each digit. CUB 3.0 sorts up to 4864 pairs in one kernel. For more
  // pairs, it clears memory twice, counts and sums the digits, and then clears memory and sorts
  // once for each digit.
  const int64_t digits = (bits + 7) / 8;
  const int64_t operations = n <= 4864 ? 1 : 4 + 2 * digits;
  simt::host::note(simt::host::Request::kLibrary, "sort", n * (4 + 8 * digits), n * 8 * digits,
                   operations);
}

#endif

}  // namespace sparsekit::cuda
