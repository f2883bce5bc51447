// R2, the roof of random reads: reads one 64-byte line per key, as fast as a loop without a hash
// table can request lines. Compiled by native.py on first use.

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

namespace {

// Prefetch distance: enough for as many concurrent reads as a core supports.
constexpr int64_t kAhead = 32;

// Adds up all eight numbers of a line, so that the whole line has to be read.
int64_t sum_lines(const int64_t* lines, const int64_t* keys, int64_t begin, int64_t end) {
  int64_t sum = 0;
  for (int64_t i = begin; i < end; ++i) {
    if (i + kAhead < end) __builtin_prefetch(lines + 8 * keys[i + kAhead]);
    const int64_t* line = lines + 8 * keys[i];
    for (int j = 0; j < 8; ++j) sum += line[j];
  }
  return sum;
}

}  // namespace

extern "C" {

// Returns zeroed memory, in pages of 2 MiB if requested and available; null if there is none.
void* pages_new(int64_t bytes, int huge) {
  constexpr int64_t kHuge = 2 << 20;
  const int64_t size = (bytes + kHuge - 1) / kHuge * kHuge;
  void* memory = nullptr;
  if (posix_memalign(&memory, kHuge, size) != 0) return nullptr;
  madvise(memory, size, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(memory, 0, size);
  return memory;
}

void pages_free(void* memory) {
  free(memory);
}

int64_t gather(const int64_t* lines, const int64_t* keys, int64_t n, int num_threads) {
  std::vector<int64_t> sums(num_threads);
  auto part = [&](int t) {
    sums[t] = sum_lines(lines, keys, n * t / num_threads, n * (t + 1) / num_threads);
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) threads.emplace_back(part, t);
  part(0);
  for (auto& thread : threads) thread.join();
  int64_t sum = 0;
  for (int64_t s : sums) sum += s;
  return sum;
}
}
