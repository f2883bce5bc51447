// Does the runner notice? Small kernels, right and wrong ones, for tests/test_simt_runner.py. Each
// line of output is the name of a case and what came of it.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "cuda/simt.cuh"

namespace {

using namespace sparsekit::simt;

constexpr int64_t kItems = 1000;
constexpr int kRuns = 50;

// Sum of all items by a tree in shared memory, with or without the first of its barriers.
SPARSEKIT_KERNEL sum_kernel(const int* items, int64_t* sum, bool with_barrier) {
  auto* part = shared<int64_t>();
  part[thread()] = global_thread() < kItems ? items[global_thread()] : 0;
  if (with_barrier) barrier();
  for (int half = block_size() / 2; half > 0; half /= 2) {
    if (thread() < half) {
      part[thread()] = static_cast<int64_t>(static_cast<uint64_t>(part[thread()]) +
                                            static_cast<uint64_t>(part[thread() + half]));
    }
    barrier();
  }
  if (thread() == 0) atomic_add(sum, part[0]);
}

// How many threads hold a claim on one of 64 places: 64 if claims are atomic.
SPARSEKIT_KERNEL claim_kernel(int32_t* places, int32_t* claims, bool atomic) {
  int32_t* place = &places[global_thread() % 64];
  bool mine = false;
  if (atomic) {
    mine = atomic_cas(place, 0, 1) == 0;
  } else if (load(place) == 0) {
    store(place, 1);
    mine = true;
  }
  if (mine) atomic_add(claims, 1);
}

SPARSEKIT_KERNEL end_before_barrier_kernel() {
  if (thread() == 3) return;
  barrier();
}

SPARSEKIT_KERNEL lane_misses_vote_kernel() {
  if (lane() == 3) return;
  warp_ballot(true);
}

SPARSEKIT_KERNEL warps_part_at_barrier_kernel() {
  if (thread() < kWarp) barrier();
}

SPARSEKIT_KERNEL collectives_differ_kernel() {
  if (lane() < 7) {
    warp_ballot(true);
  } else {
    warp_shuffle(1, 0);
  }
}

int wrong_sums(bool with_barrier) {
  const std::vector<int> items(kItems, 1);
  Grid grid = grid_for(kItems);
  grid.shared_bytes = grid.threads * static_cast<int64_t>(sizeof(int64_t));
  int wrong = 0;
  for (int run = 0; run < kRuns; ++run) {
    int64_t sum = 0;
    launch("sum", sum_kernel, grid, nullptr, items.data(), &sum, with_barrier);
    wrong += sum != kItems;
  }
  return wrong;
}

int wrong_claims(bool atomic) {
  int wrong = 0;
  for (int run = 0; run < kRuns; ++run) {
    int32_t places[64] = {}, claims = 0;
    launch("claim", claim_kernel, Grid{4, 128}, nullptr, &places[0], &claims, atomic);
    wrong += claims != 64;
  }
  return wrong;
}

const char* error_of(void (*kernel)(), const Grid& grid) {
  static std::string message;
  try {
    launch("kernel", kernel, grid, nullptr);
    return "no error";
  } catch (const std::runtime_error& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace

int main() {
  std::printf("sum: %d wrong\n", wrong_sums(true));
  std::printf("sum without a barrier: %d wrong\n", wrong_sums(false));
  std::printf("claim: %d wrong\n", wrong_claims(true));
  std::printf("claim that is not atomic: %d wrong\n", wrong_claims(false));
  const Grid grid{2, 128};
  std::printf("a thread ends before a barrier: %s\n", error_of(end_before_barrier_kernel, grid));
  std::printf("a lane misses a vote: %s\n", error_of(lane_misses_vote_kernel, grid));
  std::printf("warps part at a barrier: %s\n", error_of(warps_part_at_barrier_kernel, grid));
  std::printf("collectives differ: %s\n", error_of(collectives_differ_kernel, grid));
  std::printf("no such grid: %s\n", error_of(lane_misses_vote_kernel, Grid{1, 48}));
  // Threads that a broken kernel has left behind must not disturb the next.
  std::printf("sum again: %d wrong\n", wrong_sums(true));
}
