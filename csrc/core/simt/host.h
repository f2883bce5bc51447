// The host's version of cuda/simt.cuh, for tests. A kernel is compiled as plain C++, and its
// threads run as fibers. Two OS threads divide the warps of a block, and two blocks run at a time,
// so blocks and warps really are concurrent. Each OS thread switches between its fibers in random
// order, at every collective and barrier, and sometimes at atomics. So a missing barrier, or a
// claim that is not atomic, causes a wrong result. ThreadSanitizer, which is told about every
// fiber, reports such a mistake as a race. Only cuda/simt.cuh includes this file.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#include "simt/recording.h"

#define SPARSEKIT_KERNEL [[maybe_unused]] static void
#define SPARSEKIT_DEVICE inline
#define SPARSEKIT_GRID_CONSTANT(Type) const Type&
#define __launch_bounds__(...)

namespace sparsekit::simt {

namespace host {

// Position of the running fiber in the grid.
struct Position {
  int thread;
  int block_size;
  int64_t block;
  int64_t blocks;
  int column;
  char* shared;
};

enum class Collective { kShuffle, kBallot, kMatch, kSync };
enum class Access { kRead, kWrite, kAtomic };
// Kinds of requests from the host to the device: a kernel, a memset, a library call (which may
// launch any number of kernels), and a copy to the host (which waits).
enum class Request : int64_t { kKernel, kMemset, kLibrary, kReadBack };

const Position& position();
// In a random subset of calls, lets other fibers of this OS thread run.
void maybe_switch();
// Lets other fibers of this OS thread and other OS threads run.
void wait_a_little();
// saw() counts a thread's access to device memory. note() records a request from the host, the
// bytes that it moves, and the number of operations that it puts on the stream. Both do nothing
// unless the launching thread is counting (counts.h).
void saw(Access access, const void* address, int64_t bytes);
void note(Request request, const char* name, int64_t read, int64_t written, int64_t operations = 1);
// Returns true if the calling thread only plans calls. Its launches are checked and recorded, but
// do not run. Outputs and workspace have addresses but no memory, so a call may have any size.
bool only_plans();
// Returns an address for `bytes` bytes: without memory if the call is only planned, backed by
// memory if it is recorded (recording.h). Otherwise returns null.
void* address_without_memory(int64_t bytes);
bool lacks_memory(const void* address);
void wait_for_block();
// Waits for all lanes of the warp, then fills `values` with every lane's value.
void gather_warp(Collective kind, uint64_t value, uint64_t values[kWarp]);
// Runs body(context) once per thread of the grid. Throws std::runtime_error if a kernel breaks the
// rules of simt.cuh.
void run_grid(const char* name, const Grid& grid, void (*body)(const void*), const void* context);

template <class T>
uint64_t to_word(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  std::memcpy(&word, &value, sizeof value);
  return word;
}
template <class T>
T from_word(uint64_t word) {
  T value;
  std::memcpy(&value, &word, sizeof value);
  return value;
}

}  // namespace host

inline int thread() {
  return host::position().thread;
}
inline int block_size() {
  return host::position().block_size;
}
inline int64_t block() {
  return host::position().block;
}
inline int64_t blocks() {
  return host::position().blocks;
}
inline int column() {
  return host::position().column;
}
template <class T>
T* shared() {
  return reinterpret_cast<T*>(host::position().shared);
}

template <class T>
T* global(T* address) {
  return address;
}

template <class T>
uint64_t to_number(T* address) {
  return reinterpret_cast<uintptr_t>(address);
}
template <class T>
T* from_number(uint64_t number) {
  return reinterpret_cast<T*>(number);
}

inline void free_registers() {}

inline void barrier() {
  host::wait_for_block();
}
inline void warp_sync() {
  uint64_t values[kWarp];
  host::gather_warp(host::Collective::kSync, 0, values);
}
template <class T>
T warp_shuffle(T value, int from) {
  uint64_t values[kWarp];
  host::gather_warp(host::Collective::kShuffle, host::to_word(value), values);
  return host::from_word<T>(values[from % kWarp]);
}
inline uint32_t warp_ballot(bool condition) {
  uint64_t values[kWarp];
  host::gather_warp(host::Collective::kBallot, condition, values);
  uint32_t mask = 0;
  for (int i = 0; i < kWarp; ++i) mask |= static_cast<uint32_t>(values[i]) << i;
  return mask;
}
inline bool warp_any(bool condition) {
  return warp_ballot(condition) != 0;
}
template <class T>
uint32_t warp_match(T value) {
  uint64_t values[kWarp];
  host::gather_warp(host::Collective::kMatch, host::to_word(value), values);
  uint32_t mask = 0;
  for (int i = 0; i < kWarp; ++i) {
    mask |= static_cast<uint32_t>(values[i] == host::to_word(value)) << i;
  }
  return mask;
}
inline uint32_t warp_match_bits(uint32_t value, int) {
  return warp_match(value);
}
inline int count_bits(uint32_t mask) {
  return __builtin_popcount(mask);
}
inline int lowest_bit(uint32_t mask) {
  return __builtin_ctz(mask);
}

namespace host {

// Atomically replaces the value at `address` with change(value). Returns the old value.
template <class T, class Change>
T exchange(T* address, const Change& change) {
  maybe_switch();
  T seen, wanted;
  __atomic_load(address, &seen, __ATOMIC_RELAXED);
  do {
    wanted = change(seen);
  } while (!__atomic_compare_exchange(address, &seen, &wanted, true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED));
  return seen;
}

}  // namespace host

template <class T, class Change>
T atomic_change(T* address, const Change& change) {
  host::saw(host::Access::kAtomic, address, sizeof(T));
  return host::exchange(address, change);
}
template <class T>
T atomic_add(T* address, T value) {
  return atomic_change(address, [=](T seen) { return static_cast<T>(seen + value); });
}
template <class T>
T atomic_min(T* address, T value) {
  return atomic_change(address, [=](T seen) { return value < seen ? value : seen; });
}
inline uint32_t atomic_or(uint32_t* address, uint32_t value) {
  return atomic_change(address, [=](uint32_t seen) { return seen | value; });
}
inline uint32_t atomic_xor(uint32_t* address, uint32_t value) {
  return atomic_change(address, [=](uint32_t seen) { return seen ^ value; });
}
inline int64_t atomic_exchange(int64_t* address, int64_t value) {
  return atomic_change(address, [=](int64_t) { return value; });
}
template <class T>
T atomic_cas(T* address, T expected, T desired) {
  host::saw(host::Access::kAtomic, address, sizeof(T));
  host::maybe_switch();
  __atomic_compare_exchange(address, &expected, &desired, false, __ATOMIC_RELAXED,
                            __ATOMIC_RELAXED);
  return expected;
}
template <class T>
T load(const T* address) {
  host::saw(host::Access::kRead, address, sizeof(T));
  T value;
  __atomic_load(address, &value, __ATOMIC_RELAXED);
  host::maybe_switch();
  return value;
}
using Pair = Vec<int64_t, 2>;
inline Pair load(const Pair* address) {
  return {{load(&address->at[0]), load(&address->at[1])}};
}
// Behaves like a chip before sm_90.
inline Pair claim(Pair* address, const Pair& free, const Pair& own) {
  const int64_t seen = atomic_cas(&address->at[0], free.at[0], own.at[0]);
  return {{seen == free.at[0] ? own.at[0] : seen, free.at[1]}};
}
// Not counted, since the number of these loads depends on the OS.
template <class T>
T load_again(const T* address) {
  host::wait_a_little();
  T value;
  __atomic_load(address, &value, __ATOMIC_RELAXED);
  return value;
}
template <class T>
void store(T* address, T value) {
  host::saw(host::Access::kWrite, address, sizeof(T));
  host::maybe_switch();
  __atomic_store(address, &value, __ATOMIC_RELAXED);
}
template <int N>
void reduce_add(float* address, const Vec<float, N>& value) {
  host::saw(host::Access::kAtomic, address, sizeof value);  // count one access, as on sm_90
  for (int i = 0; i < N; ++i) {
    host::exchange(address + i, [&](float seen) { return seen + value.at[i]; });
  }
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, void*,
            const Arguments&... arguments) {
  if (host::is_recording()) {  // a graph keeps arguments by value
    return host::record([=] { launch(name, kernel, grid, nullptr, arguments...); });
  }
  const auto call = [&] { kernel(arguments...); };
  host::run_grid(
      name, grid, [](const void* context) { (*static_cast<decltype(&call)>(context))(); }, &call);
}

inline void fill_bytes(void* memory, int byte, int64_t bytes, void*) {
  if (bytes <= 0) return;
  if (host::is_recording()) return host::record([=] { fill_bytes(memory, byte, bytes, nullptr); });
  if (!host::only_plans()) std::memset(memory, byte, bytes);
  host::note(host::Request::kMemset, "memset", 0, bytes);
}

}  // namespace sparsekit::simt
