// Counts kernels' plain loads and stores. Kernels are plain C++, so only the compiler knows where
// they access memory. With -fsanitize=thread, the compiler inserts a function call before each
// access. The functions are defined here, and ThreadSanitizer's library, which also defines them,
// is not linked. As on a device, accesses to values that the optimizer keeps in registers are not
// counted.
#include <cstddef>
#include <cstdint>

#include "simt/counts.h"

namespace {

using sparsekit::simt::host::Access;
using sparsekit::simt::host::counted_launches;

[[maybe_unused]] const bool seen = sparsekit::simt::host::sees_plain_accesses = true;

// Always inlined, so that an access is cheap while nothing is being counted, which is the usual
// case.
[[gnu::always_inline]] inline void plain(Access access, const void* address, size_t bytes) {
  if (__builtin_expect(counted_launches.load(std::memory_order_relaxed) == 0, 1)) return;
  sparsekit::simt::host::saw(access, address, static_cast<int64_t>(bytes));
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define SPARSEKIT_ACCESS(name, access, bytes) \
  void __tsan_##name##bytes(void* at) {       \
    plain(Access::access, at, bytes);         \
  }
#define SPARSEKIT_ACCESSES(bytes)                \
  SPARSEKIT_ACCESS(read, kRead, bytes)           \
  SPARSEKIT_ACCESS(write, kWrite, bytes)         \
  SPARSEKIT_ACCESS(unaligned_read, kRead, bytes) \
  SPARSEKIT_ACCESS(unaligned_write, kWrite, bytes)
SPARSEKIT_ACCESSES(1)
SPARSEKIT_ACCESSES(2)
SPARSEKIT_ACCESSES(4)
SPARSEKIT_ACCESSES(8)
SPARSEKIT_ACCESSES(16)
#undef SPARSEKIT_ACCESSES
#undef SPARSEKIT_ACCESS
void __tsan_read_range(void* at, size_t bytes) {
  plain(Access::kRead, at, bytes);
}
void __tsan_write_range(void* at, size_t bytes) {
  plain(Access::kWrite, at, bytes);
}

// With -fsanitize=thread, atomics also become function calls. host.h counts atomics, so these
// functions only perform them. They are sequentially consistent, whatever memory order was
// requested.
#define SPARSEKIT_ATOMICS(bits)                                                                    \
  using Word##bits = uint##bits##_t;                                                               \
  Word##bits __tsan_atomic##bits##_load(const volatile Word##bits* at, int) {                      \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                  \
  }                                                                                                \
  void __tsan_atomic##bits##_store(volatile Word##bits* at, Word##bits value, int) {               \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                 \
  }                                                                                                \
  Word##bits __tsan_atomic##bits##_fetch_add(volatile Word##bits* at, Word##bits value, int) {     \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                        \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile Word##bits* at, Word##bits* expected, \
                                                    Word##bits desired, int, int) {                \
    return __atomic_compare_exchange_n(at, expected, desired, false, __ATOMIC_SEQ_CST,             \
                                       __ATOMIC_SEQ_CST);                                          \
  }                                                                                                \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile Word##bits* at, Word##bits* expected,   \
                                                  Word##bits desired, int, int) {                  \
    return __atomic_compare_exchange_n(at, expected, desired, true, __ATOMIC_SEQ_CST,              \
                                       __ATOMIC_SEQ_CST);                                          \
  }
SPARSEKIT_ATOMICS(8)
SPARSEKIT_ATOMICS(32)
SPARSEKIT_ATOMICS(64)
#undef SPARSEKIT_ATOMICS

}  // extern "C"
