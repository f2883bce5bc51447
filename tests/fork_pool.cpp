// Forks while other threads allocate and free large blocks; see test_memory.py. It is a separate
// program because forking a process that has loaded torch takes ten times as long.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "large_memory.h"

using sparsekit::ops::give_back_large_memory;
using sparsekit::ops::take_large_memory;

int main(int, char** argv) {
  const int forks = std::atoi(argv[1]);
  std::atomic<bool> done{false};
  std::vector<std::thread> others;
  for (size_t i = 0; i < 3; ++i) {
    others.emplace_back([i, &done] {
      for (size_t size = i + 1; !done; size = size % 40 + 3) {
        give_back_large_memory(take_large_memory(size << 20));
      }
    });
  }
  int failed = 0;
  for (int i = 0; i < forks && failed == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(30);  // ends a child that hangs
      void* memory = take_large_memory(size_t{4} << 20);
      *static_cast<char*>(memory) = 1;
      give_back_large_memory(memory);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    failed += status != 0;
  }
  done = true;
  for (auto& other : others) other.join();
  std::printf("%d children failed\n", failed);
  return failed != 0;
}
