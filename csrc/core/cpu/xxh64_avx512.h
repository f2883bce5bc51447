// XXH64 of eight texts in the lanes of a register.
#pragma once

#include "sparsekit/xxh64_batch.h"

namespace sparsekit::xxh64_avx512 {

// Of Ice Lake, Zen 4 and later: those before lack VBMI2, and gather slowly.
bool is_supported();

// As sparsekit::hash_short_texts(); only where it is supported.
void hash_short_texts(const ShortTexts& texts, int count, uint64_t seed, int64_t* codes,
                      const void* const* soon, int num_soon);

// Writes Latin-1 as UTF-8 and returns its end; up to 63 bytes beyond it are written, too.
char* put_latin1(const uint8_t* text, size_t size, char* out);

}  // namespace sparsekit::xxh64_avx512
