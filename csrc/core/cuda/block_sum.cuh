// Computes prefix sums with one block.
#pragma once

#include <cstdint>

#include "cuda/simt.cuh"

namespace sparsekit::cuda {

constexpr int kSumThreads = 256;

// Returns a grid with a single block, which the functions below require.
inline simt::Grid one_block() {
  simt::Grid grid{1, kSumThreads};
  grid.shared_bytes = kSumThreads / simt::kWarp * static_cast<int64_t>(sizeof(int64_t));
  return grid;
}

// Returns the sum of `mine` over the threads before this one. All threads of the block must call
// this function.
SPARSEKIT_DEVICE int64_t sum_before(int64_t mine) {
  auto* of_warps = simt::shared<int64_t>();
  int64_t up_to_here = mine;
  for (int step = 1; step < simt::kWarp; step *= 2) {
    const int from = (simt::lane() - step) & (simt::kWarp - 1);
    const int64_t before = simt::warp_shuffle(up_to_here, from);
    if (simt::lane() >= step) up_to_here += before;
  }
  const int warp = simt::thread() / simt::kWarp;
  if (simt::lane() == simt::kWarp - 1) of_warps[warp] = up_to_here;
  simt::barrier();
  int64_t before = up_to_here - mine;
  for (int i = 0; i < warp; ++i) before += of_warps[i];
  simt::barrier();  // wait before the shared words are reused
  return before;
}

// Calls put(i, of(0) + ... + of(i - 1)) for each i in [0, n].
template <class Of, class Put>
SPARSEKIT_DEVICE void sum_up(int n, const Of& of, const Put& put) {
  const int run = (n + simt::block_size() - 1) / simt::block_size();
  const auto within = [&](int i) { return i < n ? i : n; };
  const int begin = within(simt::thread() * run), end = within(begin + run);
  int64_t sum = 0;
  for (int i = begin; i < end; ++i) sum += of(i);
  sum = sum_before(sum);
  for (int i = begin; i < end; ++i) {
    put(i, sum);
    sum += of(i);
  }
  if (simt::thread() + 1 == simt::block_size()) put(n, sum);
}

}  // namespace sparsekit::cuda
