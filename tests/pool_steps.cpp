// Allocates and frees large blocks of varying sizes under a sanitizer; see test_memory.py.
#include <cstdio>
#include <random>
#include <vector>

#include "large_memory.h"

extern "C" size_t sparsekit_empty_cache();
extern "C" void sparsekit_pool_bytes(size_t* in_use, size_t* idle, size_t* recent_peak);

int main() {
  std::mt19937 random(1);
  std::vector<void*> held;
  for (int step = 0; step < 3000; ++step) {
    // Alternate large and small blocks, so that idle blocks reach the limits on bytes and age.
    const size_t most = step / 500 % 2 == 0 ? 60 : 6;
    const size_t bytes = (2 + random() % most) << 20;
    auto* memory = static_cast<char*>(sparsekit::ops::take_large_memory(bytes));
    memory[0] = memory[bytes - 1] = 1;
    held.push_back(memory);
    while (held.size() > random() % 6) {
      const size_t which = random() % held.size();
      sparsekit::ops::give_back_large_memory(held[which]);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(which));
    }
    if (random() % 400 == 0) sparsekit_empty_cache();
  }
  for (void* memory : held) sparsekit::ops::give_back_large_memory(memory);
  size_t in_use = 0, idle = 0, recent_peak = 0;
  sparsekit_pool_bytes(&in_use, &idle, &recent_peak);
  const size_t released = sparsekit_empty_cache();
  std::printf("%zu in use, %s\n", in_use,
              released == idle && idle > 0 ? "all released" : "not all");
}
