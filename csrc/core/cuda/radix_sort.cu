#include "cuda/radix_sort.cuh"

namespace sparsekit::cuda {
namespace {

// Shared memory of sort_digit_kernel.
struct SortBlock {
  SumBlock sums;
  int32_t begins[kSumWarps][kDigits];  // where a warp's pairs with each digit go in the tile
  int32_t to[kDigits];                 // how much further they go in the output
  uint32_t keys[kSortTile];            // pairs of the tile, sorted
  int32_t values[kSortTile];
};

// The second launch bound makes ptxas use a few more registers instead of spilling.
SPARSEKIT_KERNEL __launch_bounds__(kSumThreads, 2)
    sort_digit_kernel(RadixSort sort, int digit, Pairs from, int32_t n, Pairs to) {
  auto& block = *simt::shared<SortBlock>();
  const LookBack totals = sort.totals.after(digit);
  const int64_t tile = totals.take_tile();
  const int64_t first = tile * kSortTile;
  const uint32_t* keys_in = from.keys + first;
  const int32_t* values_in = from.values + first;
  const auto count = static_cast<int>(n - first < kSortTile ? n - first : kSortTile);
  const int warp = simt::thread() / simt::kWarp;
  // The tile's pairs are ordered by warp, then step, then lane.
  const int mine = warp * kSortSteps * simt::kWarp + simt::lane();
  const auto place = [=](int step) { return mine + step * simt::kWarp; };

  // Count each warp's keys with each digit. A key's rank is the number of keys with the same digit
  // before it in its warp.
  int32_t* own = block.begins[warp];
  for (int d = simt::lane(); d < kDigits; d += simt::kWarp) own[d] = 0;
  simt::warp_sync();
  uint32_t key[kSortSteps];
  int32_t rank[kSortSteps];
#pragma unroll
  for (int i = 0; i < kSortSteps; ++i) key[i] = place(i) < count ? keys_in[place(i)] : 0;
#pragma unroll
  for (int i = 0; i < kSortSteps; ++i) {
    const int d = place(i) < count ? digit_of(key[i], digit) : -1;
    const uint32_t peers = simt::warp_match(d);
    const uint32_t before = simt::lanes_before(peers, simt::lane());
    const int32_t counted = d < 0 ? 0 : own[d];
    rank[i] = counted + simt::count_bits(before);
    simt::warp_sync();
    if (d >= 0 && before == 0) own[d] = counted + simt::count_bits(peers);
    simt::warp_sync();
  }
  simt::barrier();

  // Find where the pairs with this thread's digit begin, in the tile and in the output.
  const int own_digit = simt::thread();
  int32_t in_tile = 0;
  for (int w = 0; w < kSumWarps; ++w) in_tile += block.begins[w][own_digit];
  if (tile > 0) totals.publish(tile, own_digit, in_tile, false);
  auto begin = static_cast<int32_t>(sum_before(in_tile));
  const auto before =
      tile > 0 ? totals.total_before(tile, own_digit)
               : static_cast<int32_t>(sum_before(sort.counts[digit * kDigits + own_digit]));
  totals.publish(tile, own_digit, before + in_tile, true);
  block.to[own_digit] = before - begin;
  for (int w = 0; w < kSumWarps; ++w) {
    const int32_t in_warp = block.begins[w][own_digit];
    block.begins[w][own_digit] = begin;
    begin += in_warp;
  }
  simt::barrier();

  // Sort in shared memory first, so that neighbouring threads write neighbouring pairs.
#pragma unroll
  for (int i = 0; i < kSortSteps; ++i) {
    if (place(i) >= count) continue;
    const int32_t at = own[digit_of(key[i], digit)] + rank[i];
    block.keys[at] = key[i];
    block.values[at] = values_in[place(i)];
  }
  simt::barrier();
  for (int i = simt::thread(); i < count; i += kSumThreads) {
    const int32_t at = i + block.to[digit_of(block.keys[i], digit)];
    to.keys[at] = block.keys[i];
    to.values[at] = block.values[i];
  }
}

}  // namespace

void sort_by_digits(const RadixSort& sort, int num_digits, int64_t n, Pairs spare, Pairs to,
                    void* stream) {
  if (n == 0) return;
  const simt::Grid grid{sort.totals.tiles, kSumThreads, sizeof(SortBlock)};
  for (int digit = 0; digit < num_digits; ++digit) {
    const Pairs from = unsorted_pairs(num_digits - digit, spare, to);
    const Pairs sorted = unsorted_pairs(num_digits - digit - 1, spare, to);
    simt::launch("sort: digit", sort_digit_kernel, grid, stream, sort, digit, from,
                 static_cast<int32_t>(n), sorted);
  }
}

}  // namespace sparsekit::cuda
