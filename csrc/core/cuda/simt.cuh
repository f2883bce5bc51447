// The machine-dependent functions that kernels use. For nvcc, each function here is a thin wrapper
// around a CUDA intrinsic. For g++, simt/host.h defines these functions instead, so that tests can
// run all threads of a block concurrently.
//
// Rules for kernels, which the host runner enforces: a block has a multiple of 32 threads. Every
// lane of a warp takes part in each collective, and every thread of a block in each barrier. Memory
// that another thread may write in the same launch is accessed only through the atomics and the
// relaxed load and store. Everything else is plain C++.
#pragma once

#include <cstdint>

namespace sparsekit::simt {

constexpr int kWarp = 32;

// The shape of a launch. It has blocks * columns blocks, each with `threads` threads and
// shared_bytes of shared memory. In a kernel, block() < blocks and column() < columns.
struct Grid {
  int64_t blocks;
  int threads = 256;
  int64_t shared_bytes = 0;
  int columns = 1;
};

// Returns a grid for n threads. It has at least one block, so that a kernel without items can still
// write its result.
inline Grid grid_for(int64_t n, int threads = 256) {
  return Grid{n <= 0 ? 1 : (n + threads - 1) / threads, threads};
}

// Like grid_for, for kernels that loop over their items with the stride of the grid. The grid is
// limited to a few full waves of the largest chip, so that a kernel costs little if the device
// finds that there is little to do. The host runner uses fewer blocks, so that small tests loop,
// too.
#ifdef __CUDACC__
constexpr int64_t kMostBlocks = 2112;
#else
constexpr int64_t kMostBlocks = 3;
#endif
inline Grid strided_grid_for(int64_t n, int threads = 256) {
  Grid grid = grid_for(n, threads);
  if (grid.blocks > kMostBlocks) grid.blocks = kMostBlocks;
  return grid;
}

// N values that are loaded or stored in one access of sizeof(T) * N bytes, at most 16.
template <class T, int N>
struct alignas(sizeof(T) * N) Vec {
  T at[N];
};

}  // namespace sparsekit::simt

#ifndef __CUDACC__
#include "simt/host.h"
#else

#include <cuda_runtime.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>

#define SPARSEKIT_KERNEL [[maybe_unused]] static __global__ void
#define SPARSEKIT_DEVICE __device__ __forceinline__
// Declares a large kernel parameter that threads read in place, without a copy.
#define SPARSEKIT_GRID_CONSTANT(Type) const __grid_constant__ Type

namespace sparsekit::simt {

SPARSEKIT_DEVICE int thread() {
  return static_cast<int>(threadIdx.x);
}
SPARSEKIT_DEVICE int block_size() {
  return static_cast<int>(blockDim.x);
}
SPARSEKIT_DEVICE int64_t block() {
  return blockIdx.x;
}
SPARSEKIT_DEVICE int64_t blocks() {
  return gridDim.x;
}
SPARSEKIT_DEVICE int column() {
  return static_cast<int>(blockIdx.y);
}

// Returns the block's shared memory. Every call returns the same memory; it is 16-byte aligned and
// uninitialised.
template <class T>
SPARSEKIT_DEVICE T* shared() {
  extern __shared__ int4 sparsekit_shared_memory[];
  return reinterpret_cast<T*>(sparsekit_shared_memory);
}

// Tells nvcc that a pointer points to global memory. For a pointer that was itself read from
// memory, nvcc cannot know this and would use slower generic accesses.
template <class T>
SPARSEKIT_DEVICE T* global(T* address) {
  __builtin_assume(__isGlobal(address));
  return address;
}

// to_number() converts a pointer to global memory to an integer, which can be passed to a shuffle.
// from_number() converts the integer back.
template <class T>
SPARSEKIT_DEVICE uint64_t to_number(T* address) {
  return __cvta_generic_to_global(address);
}
template <class T>
SPARSEKIT_DEVICE T* from_number(uint64_t number) {
  return static_cast<T*>(__cvta_global_to_generic(number));
}

// Makes the compiler read memory again instead of keeping values in registers.
SPARSEKIT_DEVICE void free_registers() {
  asm volatile("" ::: "memory");
}

// Waits for all threads of the block. Their earlier writes are visible afterwards.
SPARSEKIT_DEVICE void barrier() {
  __syncthreads();
}
// Like barrier(), for the lanes of a warp.
SPARSEKIT_DEVICE void warp_sync() {
  __syncwarp();
}

// Collectives of a warp. They do not order memory accesses.
template <class T>
SPARSEKIT_DEVICE T warp_shuffle(T value, int from) {
  return __shfl_sync(~0u, value, from);
}
SPARSEKIT_DEVICE uint32_t warp_ballot(bool condition) {
  return __ballot_sync(~0u, condition);
}
SPARSEKIT_DEVICE bool warp_any(bool condition) {
  return __any_sync(~0u, condition);
}
// Returns the mask of the lanes whose value equals this lane's.
template <class T>
SPARSEKIT_DEVICE uint32_t warp_match(T value) {
  return __match_any_sync(~0u, value);
}
// Like warp_match(), for values below 2^bits; `bits` is the same in all lanes. Takes one vote per
// bit.
SPARSEKIT_DEVICE uint32_t warp_match_bits(uint32_t value, int bits) {
  uint32_t same = ~0u;
  for (int bit = 0; bit < bits; ++bit) {
    const bool is_set = (value >> bit & 1) != 0;
    const uint32_t set = __ballot_sync(~0u, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

// count_bits() returns the number of set bits; lowest_bit() returns the index of the lowest set
// bit, for mask != 0.
SPARSEKIT_DEVICE int count_bits(uint32_t mask) {
  return __popc(mask);
}
SPARSEKIT_DEVICE int lowest_bit(uint32_t mask) {
  return __ffs(static_cast<int>(mask)) - 1;
}

// Relaxed atomics, device-wide. Each returns the old value.
template <class T>
SPARSEKIT_DEVICE T atomic_add(T* address, T value) {
  if constexpr (sizeof(T) == 8 && static_cast<T>(1.5) == T{1}) {
    return static_cast<T>(atomicAdd(reinterpret_cast<unsigned long long*>(address),
                                    static_cast<unsigned long long>(value)));
  } else {
    return atomicAdd(address, value);
  }
}
SPARSEKIT_DEVICE int32_t atomic_min(int32_t* address, int32_t value) {
  return atomicMin(address, value);
}
SPARSEKIT_DEVICE int64_t atomic_min(int64_t* address, int64_t value) {
  return atomicMin(reinterpret_cast<long long*>(address), static_cast<long long>(value));
}
SPARSEKIT_DEVICE uint32_t atomic_or(uint32_t* address, uint32_t value) {
  return atomicOr(address, value);
}
SPARSEKIT_DEVICE uint32_t atomic_xor(uint32_t* address, uint32_t value) {
  return atomicXor(address, value);
}
SPARSEKIT_DEVICE int64_t atomic_exchange(int64_t* address, int64_t value) {
  return static_cast<int64_t>(atomicExch(reinterpret_cast<unsigned long long*>(address),
                                         static_cast<unsigned long long>(value)));
}
SPARSEKIT_DEVICE int32_t atomic_cas(int32_t* address, int32_t expected, int32_t desired) {
  return atomicCAS(address, expected, desired);
}
SPARSEKIT_DEVICE int64_t atomic_cas(int64_t* address, int64_t expected, int64_t desired) {
  return static_cast<int64_t>(atomicCAS(reinterpret_cast<unsigned long long*>(address),
                                        static_cast<unsigned long long>(expected),
                                        static_cast<unsigned long long>(desired)));
}
template <class T>
SPARSEKIT_DEVICE T load(const T* address) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "words only");
  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> word;
  if constexpr (sizeof(T) == 4) {
    asm volatile("ld.relaxed.gpu.b32 %0, [%1];" : "=r"(word) : "l"(address));
  } else {
    asm volatile("ld.relaxed.gpu.b64 %0, [%1];" : "=l"(word) : "l"(address));
  }
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}
template <class T>
SPARSEKIT_DEVICE void store(T* address, T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "words only");
  std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t> word;
  memcpy(&word, &value, sizeof value);
  if constexpr (sizeof(T) == 4) {
    asm volatile("st.relaxed.gpu.b32 [%0], %1;" ::"l"(address), "r"(word) : "memory");
  } else {
    asm volatile("st.relaxed.gpu.b64 [%0], %1;" ::"l"(address), "l"(word) : "memory");
  }
}

// A 16-byte aligned pair of words. load() reads each word separately, so it may return one new word
// and one old word.
using Pair = Vec<int64_t, 2>;
SPARSEKIT_DEVICE Pair load(const Pair* address) {
  Pair pair;
  asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
               : "=l"(pair.at[0]), "=l"(pair.at[1])
               : "l"(__cvta_generic_to_global(address)));
  return pair;
}

// Replaces a pair with `own` if it equals `free`, and returns the previous pair; if that equals
// `free`, the pair has been claimed.
//
// Before sm_90, which introduced 16-byte atomics, only the first word is compared and replaced. A
// successful claim then returns {own.at[0], free.at[1]}, as if another thread had stored the first
// word, and the caller updates the second word as it does after another thread's claim.
SPARSEKIT_DEVICE Pair claim(Pair* address, const Pair& free, const Pair& own) {
  Pair seen = free;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .b128 seen, own;\n"
      "mov.b128 seen, {%0, %1};\n"
      "mov.b128 own, {%3, %4};\n"
      "atom.relaxed.gpu.global.cas.b128 seen, [%2], seen, own;\n"
      "mov.b128 {%0, %1}, seen;\n"
      "}"
      : "+l"(seen.at[0]), "+l"(seen.at[1])
      : "l"(__cvta_generic_to_global(address)), "l"(own.at[0]), "l"(own.at[1])
      : "memory");
#else
  seen.at[0] = atomic_cas(&address->at[0], free.at[0], own.at[0]);
  if (seen.at[0] == free.at[0]) seen.at[0] = own.at[0];
#endif
  return seen;
}

// Like load(), for loops that wait until another block stores a value.
template <class T>
SPARSEKIT_DEVICE T load_again(const T* address) {
  __nanosleep(20);
  return load(address);
}

// Adds value[j] to address[j] for each j, atomically per element. Uses a single 16-byte reduction
// in the L2 cache if the chip supports it.
template <int N>
SPARSEKIT_DEVICE void reduce_add(float* address, const Vec<float, N>& value) {
#if __CUDA_ARCH__ >= 900
  constexpr bool kAtOnce = N == 4;
#else
  constexpr bool kAtOnce = false;
#endif
  if constexpr (kAtOnce) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                     __cvta_generic_to_global(address)),
                 "f"(value.at[0]), "f"(value.at[1]), "f"(value.at[2]), "f"(value.at[3])
                 : "memory");
  } else {
    for (int i = 0; i < N; ++i) atomicAdd(address + i, value.at[i]);
  }
}

// Host functions. On failure, they throw std::runtime_error with CUDA's message.
inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();  // clear it: otherwise CUB's next launch would seem to have failed
  throw std::runtime_error(std::string("sparsekit: ") + what + ": " + cudaGetErrorString(error));
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Grid& grid, void* stream,
            const Arguments&... arguments) {
  if (grid.blocks < 1 || grid.blocks > INT32_MAX || grid.columns > 65535) {
    throw std::runtime_error(std::string("sparsekit: ") + name + ": a grid of " +
                             std::to_string(grid.blocks) + " times " +
                             std::to_string(grid.columns) + " blocks, which no device runs");
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid.blocks), static_cast<unsigned>(grid.columns));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<size_t>(grid.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&config, kernel, arguments...), name);
}

// Fills device memory with copies of one byte.
inline void fill_bytes(void* device, int byte, int64_t bytes, void* stream) {
  if (bytes == 0) return;
  check(cudaMemsetAsync(device, byte, bytes, static_cast<cudaStream_t>(stream)), "memset");
}

}  // namespace sparsekit::simt
#endif

namespace sparsekit::simt {

SPARSEKIT_DEVICE int lane() {
  return thread() % kWarp;
}
SPARSEKIT_DEVICE int64_t global_thread() {
  return block() * block_size() + thread();
}
SPARSEKIT_DEVICE int64_t global_threads() {
  return blocks() * block_size();
}
// Returns the mask of those lanes in `mask` that are below `lane`.
SPARSEKIT_DEVICE uint32_t lanes_before(uint32_t mask, int lane) {
  return mask & ((1u << lane) - 1);
}

}  // namespace sparsekit::simt
