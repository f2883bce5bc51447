// The engines for x86-64. Call an engine's hash_together only if its is_supported() returns true.
#pragma once

#include "sparsekit/xxh64.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define SPARSEKIT_HAS_X86_ENGINES
#endif

namespace sparsekit {
namespace xxh64_avx512 {

bool is_supported();
void hash_together(const WaitingText* texts, int count, size_t size, uint64_t seed, int64_t* codes);

}  // namespace xxh64_avx512
namespace xxh64_avx2 {

bool is_supported();
void hash_together(const WaitingText* texts, int count, size_t size, uint64_t seed, int64_t* codes);

}  // namespace xxh64_avx2
}  // namespace sparsekit
