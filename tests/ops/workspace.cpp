// Runs the engine's ops with exactly the workspace that they request; see test_workspace.py. A
// pattern past its end must be intact afterwards.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <type_traits>
#include <vector>

#include "sparsekit/bucketize.h"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/segment_sum.h"
#include "sparsekit/unique.h"

using namespace sparsekit;

namespace {

constexpr int64_t kGuard = int64_t{4} << 20;
constexpr int kPattern = 0xA5;

int failures = 0;
int num_threads = 1;

// Cuts a range as threads would, and runs the parts one after another.
void run(int64_t begin, int64_t end, int64_t grain, ParallelFor::Body body, void* context) {
  const int64_t part = std::max({grain, int64_t{1}, (end - begin + num_threads - 1) / num_threads});
  for (; begin < end; begin += part) body(begin, std::min(end, begin + part), context);
}

ParallelFor threads() {
  return ParallelFor(run, num_threads);
}

template <class Op>
void with_workspace(const char* op, int64_t n, int64_t bytes, const Op& call) {
  std::unique_ptr<char[]> memory(new char[static_cast<size_t>(bytes + kGuard + 64)]);
  char* begin = memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64);
  char* behind = begin + bytes;
  std::memset(behind, kPattern, kGuard);
  call(begin);
  const auto* bad = std::find_if(behind, behind + kGuard,
                                 [](char c) { return static_cast<unsigned char>(c) != kPattern; });
  if (bad == behind + kGuard) return;
  std::printf("%s of %lld entries with %d threads writes at %lld of %lld bytes\n", op,
              static_cast<long long>(n), num_threads, static_cast<long long>(bad - begin),
              static_cast<long long>(bytes));
  ++failures;
}

template <class Key>
void try_unique(int64_t n, int64_t distinct) {
  std::vector<Key> keys(static_cast<size_t>(n)), unique_keys(keys.size());
  std::vector<int64_t> inverse(keys.size()), counts(keys.size());
  for (int64_t i = 0; i < n; ++i) keys[static_cast<size_t>(i)] = static_cast<Key>(i % distinct * 7);
  with_workspace("unique", n, cpu::unique_workspace_bytes(n), [&](void* workspace) {
    const int64_t found = cpu::unique(keys.data(), n, 3, unique_keys.data(), inverse.data(),
                                      counts.data(), workspace, threads());
    if (found == std::min(n, distinct)) return;
    std::printf("unique finds %lld keys\n", static_cast<long long>(found));
    ++failures;
  });
}

void try_bucketize(int64_t n, int64_t world_size) {
  std::vector<int64_t> keys(static_cast<size_t>(n)), by_owner(keys.size()),
      permutation(keys.size());
  std::vector<int64_t> counts(static_cast<size_t>(world_size));
  std::iota(keys.begin(), keys.end(), -n / 2);
  with_workspace("bucketize", n, cpu::bucketize_workspace_bytes(n, world_size),
                 [&](void* workspace) {
                   cpu::bucketize(keys.data(), n, Owners(nullptr, world_size), by_owner.data(),
                                  counts.data(), permutation.data(), workspace, threads());
                 });
}

template <class T>
void try_sums(int64_t n, int64_t dim, int64_t num_segments) {
  std::vector<int64_t> ids(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    ids[static_cast<size_t>(i)] = i % 3 == 0 ? num_segments - 1 : i * 7 % num_segments;
  }
  std::vector<T> data(static_cast<size_t>(n * dim)), out(static_cast<size_t>(num_segments * dim));
  with_workspace("segment_sum", n,
                 cpu::segment_sum_workspace_bytes<T>(n, dim, num_segments, threads()),
                 [&](void* workspace) {
                   cpu::unsorted_segment_sum(data.data(), ids.data(), n, dim, num_segments,
                                             out.data(), workspace, threads());
                 });
  const int64_t num_bags = n / 2 + 1;
  std::vector<int64_t> offsets(static_cast<size_t>(num_bags + 1), n);
  for (int64_t b = 0; b < num_bags; ++b) offsets[static_cast<size_t>(b)] = 2 * b;
  const Bags bags{ids.data(), n, offsets.data(), num_bags};
  std::vector<T> grad(static_cast<size_t>(num_bags * dim));
  with_workspace("embedding_bag_backward", n,
                 cpu::embedding_bag_backward_workspace_bytes<T>(bags, dim, num_segments, threads()),
                 [&](void* workspace) {
                   cpu::embedding_bag_backward(grad.data(), num_segments, dim, bags,
                                               static_cast<const Acc<T>*>(nullptr), Combiner::kMean,
                                               out.data(), workspace, threads());
                 });
}

}  // namespace

int main() {
  for (const int count : {1, 2, 5, 40}) {
    num_threads = count;
    for (const int64_t n :
         {0, 1, 7, 1000, 8192, 65'535, 65'536, 100'000, 131'071, 131'072, 300'001}) {
      for (const int64_t distinct : {int64_t{1}, n / 2 + 1, n + 1}) {
        try_unique<int64_t>(n, distinct);
        try_unique<int32_t>(n, distinct);
      }
      for (const int64_t world_size : {1, 3, 2048}) try_bucketize(n, world_size);
    }
    for (const int64_t n : {0, 1, 1024, 5000, 70'001}) {
      for (const int64_t dim : {0, 1, 5, 64}) {
        for (const int64_t num_segments : {1, 30, 3000}) {
          try_sums<float>(n, dim, num_segments);
          try_sums<double>(n, dim, num_segments);
          try_sums<BFloat16>(n, dim, num_segments);
        }
      }
    }
  }
  std::printf("%d failures\n", failures);
  return failures != 0;
}
