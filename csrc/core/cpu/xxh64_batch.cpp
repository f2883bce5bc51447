#include "sparsekit/xxh64_batch.h"

#include <atomic>

#include "cpu/xxh64_avx512.h"

namespace sparsekit {
namespace {

std::atomic<bool> use_avx512{xxh64_avx512::is_supported()};

}  // namespace

bool use_xxh64_avx512(bool wanted) {
  return use_avx512 = wanted && xxh64_avx512::is_supported();
}

bool uses_xxh64_avx512() {
  return use_avx512;
}

void hash_short_texts(const ShortTexts& texts, int count, uint64_t seed, int64_t* codes,
                      const void* const* soon, int num_soon) {
  if (use_avx512) {
    xxh64_avx512::hash_short_texts(texts, count, seed, codes, soon, num_soon);
    return;
  }
  for (int k = 0; k < count; ++k) {
    if (k < num_soon) {
      prefetch(soon[k]);
      prefetch(static_cast<const char*>(soon[k]) + 48);
    }
    codes[k] = static_cast<int64_t>(xxh64(texts.data[k], texts.sizes[k], seed));
  }
}

}  // namespace sparsekit
