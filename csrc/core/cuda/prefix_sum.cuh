// Prefix sums within a block, and across the blocks of a launch by decoupled look-back.
#pragma once

#include <cstdint>

#include "cuda/simt.cuh"
#include "sparsekit/arena.h"
#include "sparsekit/host_device.h"

namespace sparsekit::cuda {

// Number of threads in a block that computes prefix sums.
constexpr int kSumThreads = 256;
constexpr int kSumWarps = kSumThreads / simt::kWarp;

// The first part of such a block's shared memory.
struct SumBlock {
  int64_t of_warps[kSumWarps];
  int64_t for_all;  // a value that one thread passes to all threads
};

// Returns a grid for the functions below, with blocks * kSumThreads threads.
inline simt::Grid sum_grid(int64_t blocks) {
  return {blocks, kSumThreads, sizeof(SumBlock)};
}

// Returns the sum of `mine` over all threads with a lower index. All threads of the block must call
// this function.
SPARSEKIT_DEVICE int64_t sum_before(int64_t mine) {
  int64_t* of_warps = simt::shared<SumBlock>()->of_warps;
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
  simt::barrier();  // wait for all reads before the shared words are reused
  return before;
}

// Running totals over the tiles of a launch, one block per tile. A block publishes its tile's sum,
// adds up the published sums of earlier tiles, back to the nearest one that has published its
// total, and then publishes its own total. Blocks draw tickets for tiles, so the tiles that a block
// waits for belong to blocks that are already running, in whatever order the device starts blocks.
//
// The value and state of a sum share a word, so relaxed accesses suffice. The state includes the
// launch, so that several launches in a row can use the same words, which are cleared once.
struct LookBack {
  // [1 + tiles * sums] The ticket, and the words of all sums. Clearing sets words to kCleared,
  // every byte 0xFF.
  int64_t* words;
  int64_t tiles;
  int32_t sums;  // number of sums per tile
  int32_t launch = 0;

  static constexpr int64_t kCleared = -1;

  LookBack(Arena& arena, int64_t tiles, int32_t sums)
      : words(arena.take<int64_t>(1 + tiles * sums)), tiles(tiles), sums(sums) {}

  int64_t* end() const { return words + 1 + tiles * sums; }
  // Returns the totals to use in the n-th launch after this one.
  SPARSEKIT_HOST_DEVICE LookBack after(int n) const {
    LookBack later = *this;
    later.launch += n;
    return later;
  }

  SPARSEKIT_DEVICE void clear() const {
    const int64_t count = 1 + tiles * sums;
    for (int64_t i = simt::global_thread(); i < count; i += simt::global_threads()) {
      words[i] = kCleared;
    }
  }

  // Returns the tile of this block. All threads of the block must call this function once.
  SPARSEKIT_DEVICE int64_t take_tile() const {
    int64_t& tile = simt::shared<SumBlock>()->for_all;
    if (simt::thread() == 0) tile = simt::atomic_add(words, int64_t{1}) + 1 - launch * tiles;
    simt::barrier();
    return tile;
  }

  // The state of a word is 2 * launch, or 2 * launch + 1 if the value is a total.
  SPARSEKIT_DEVICE bool has_value(int64_t word) const { return word >> 33 == launch; }
  SPARSEKIT_DEVICE bool has_total(int64_t word) const { return word >> 32 == 2 * launch + 1; }
  SPARSEKIT_DEVICE const int64_t* word(int64_t tile, int sum) const {
    return words + 1 + tile * sums + sum;
  }
  SPARSEKIT_DEVICE void publish(int64_t tile, int sum, int32_t value, bool total) const {
    const int64_t state = 2 * launch + static_cast<int64_t>(total);
    simt::store(words + 1 + tile * sums + sum, state << 32 | static_cast<uint32_t>(value));
  }

  // Returns a sum's total over all tiles before `tile`, which must not be 0.
  SPARSEKIT_DEVICE int32_t total_before(int64_t tile, int sum) const {
    constexpr int kAhead = 4;  // number of words that are loaded at a time
    int32_t total = 0;
    for (int64_t last = tile - 1;; last -= kAhead) {
      int64_t seen[kAhead];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) seen[i] = simt::load(word(last < i ? 0 : last - i, sum));
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        while (!has_value(seen[i])) seen[i] = simt::load_again(word(last - i, sum));
        total += static_cast<int32_t>(seen[i]);
        if (has_total(seen[i])) return total;
      }
    }
  }

  // Like total_before(), for tiles with only one sum. All lanes of a warp must call this function;
  // they read the words of 32 tiles at a time.
  SPARSEKIT_DEVICE int32_t total_before_by_warp(int64_t tile) const {
    for (int32_t total = 0;; tile -= simt::kWarp) {
      const int64_t before = tile - 1 - simt::lane();
      const int64_t* own = word(before < 0 ? 0 : before, 0);
      int64_t seen = simt::load(own);
      // Returns the bit of the lane with the nearest total, or 0. Lanes beyond that lane do not
      // count.
      const auto nearest_total = [&] {
        const uint32_t totals = simt::warp_ballot(has_total(seen));
        return totals & (0u - totals);
      };
      const auto counts = [](uint32_t nearest) {
        return ((nearest | (nearest - 1)) >> simt::lane() & 1) != 0;
      };
      uint32_t nearest = nearest_total();
      while (simt::warp_any(counts(nearest) && !has_value(seen))) {
        seen = simt::load_again(own);
        nearest = nearest_total();
      }
      int32_t sum = counts(nearest) ? static_cast<int32_t>(seen) : 0;
      for (int step = simt::kWarp / 2; step > 0; step /= 2) {
        sum += simt::warp_shuffle(sum, simt::lane() ^ step);
      }
      total += sum;
      if (nearest != 0) return total;
    }
  }

  // Returns the sum of `mine` over all threads of earlier tiles, and over the threads of this block
  // with a lower index. All threads of the block must call this function once.
  SPARSEKIT_DEVICE int32_t sum_before_in_launch(int64_t tile, int32_t mine) const {
    int64_t& before = simt::shared<SumBlock>()->for_all;
    const auto in_block = static_cast<int32_t>(sum_before(mine));
    if (simt::thread() / simt::kWarp == kSumWarps - 1) {
      const int32_t own = simt::warp_shuffle(in_block + mine, simt::kWarp - 1);
      const bool is_last = simt::lane() == simt::kWarp - 1;
      if (is_last && tile > 0) publish(tile, 0, own, false);
      const int32_t total = tile > 0 ? total_before_by_warp(tile) : 0;
      if (is_last) {
        publish(tile, 0, total + own, true);
        before = total;
      }
    }
    simt::barrier();
    return static_cast<int32_t>(before) + in_block;
  }
};

}  // namespace sparsekit::cuda
