// Checks that the runner finds errors, using small correct and incorrect kernels.
// tests/test_simt_runner.py runs this program. Each output line has the name of a case and its
// result.
#include <cstdio>
#include <stdexcept>
#include <vector>

#include "cuda/simt.cuh"
#include "simt/counts.h"

extern "C" void sparsekit_simt_count(int on);
extern "C" const void* sparsekit_simt_records(int64_t* count);

namespace {

using namespace sparsekit::simt;

constexpr int64_t kItems = 1000;
constexpr int kRuns = 50;

// Sums all items with a tree reduction in shared memory. If with_barrier is false, the first
// barrier is missing.
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

// Counts successful claims on 64 elements. If claims are atomic, exactly 64 succeed.
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

struct Factors {
  int64_t by[3];
};

// Each thread reads its item and a factor common to all threads, writes their product, and counts
// itself. Accesses to parameters, the stack and shared memory must not be counted as device memory.
SPARSEKIT_KERNEL counted_kernel(Factors factors, const int* items, const int* factor,
                                int64_t* products, int32_t* threads) {
  volatile int64_t on_stack[2] = {factors.by[0], *factor};
  auto* in_block = shared<int64_t>();
  if (thread() == 0) in_block[0] = factors.by[2];
  barrier();
  products[thread()] = items[thread()] * on_stack[0] * on_stack[1] * in_block[0];
  atomic_add(threads, 1);
  if (thread() == 0) atomic_add(&in_block[0], int64_t{1});
}

void print_counts() {
  alignas(32) static int items[64], factor[8];
  alignas(32) static int64_t products[64];
  alignas(32) static int32_t threads[8];
  const auto run = [] {
    Grid grid{1, 64};
    grid.shared_bytes = sizeof(int64_t);
    launch("counted", counted_kernel, grid, nullptr, Factors{{1, 2, 3}}, &items[0], &factor[0],
           &products[0], &threads[0]);
  };
  sparsekit_simt_count(1);
  for (int i = 0; i < 2; ++i) run();
  fill_bytes(products, 0, sizeof products, nullptr);
  int64_t number = 0;
  const auto* records = static_cast<const host::Record*>(sparsekit_simt_records(&number));
  for (int64_t i = 0; i < number; ++i) {
    const host::Record& record = records[i];
    std::printf("counts of %s %d: %d atomics, %d accessed, %d read, %d written\n", record.name,
                static_cast<int>(i), static_cast<int>(record.atomics),
                static_cast<int>(record.accessed), static_cast<int>(record.read),
                static_cast<int>(record.written));
  }
  sparsekit_simt_count(0);
  run();
  sparsekit_simt_records(&number);
  std::printf("counts when off: %d records\n", static_cast<int>(number));
  sparsekit_simt_count(1);
  sparsekit_simt_records(&number);
  std::printf("counts when on again: %d records\n", static_cast<int>(number));
  sparsekit_simt_count(0);
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
  print_counts();
  // Check that threads left behind by a broken kernel do not disturb the next kernel.
  std::printf("sum again: %d wrong\n", wrong_sums(true));
}
