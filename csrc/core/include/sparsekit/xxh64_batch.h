// XXH64 of short texts, several at once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparsekit/xxh64.h"

namespace sparsekit {

// A text of a batch: its code goes to codes[place].
struct ShortText {
  const char* data;
  uint32_t size;
  uint32_t place;
};

constexpr size_t kShortText = 64;
// Texts of a batch: enough to find neighbours of similar length, few enough for the first-level
// cache.
constexpr int kBatch = 512;

// codes[texts[k].place] = XXH64 of texts[k], for k in [0, count). `count` is at most kBatch, and the
// sizes are below kShortText. Reads no byte beyond a text.
void xxh64_short_texts(const ShortText* texts, int count, uint64_t seed, int64_t* codes);

// Collects up to kBatch texts and then hashes them.
class Xxh64Batch {
 public:
  explicit Xxh64Batch(uint64_t seed) : seed_(seed) {}

  // codes[place] becomes the code of the bytes at `data`, which must stay there until flush().
  void add(const char* data, size_t size, uint32_t place, int64_t* codes) {
    if (size < kShortText) {
      texts_[count_++] = {data, static_cast<uint32_t>(size), place};
    } else {
      codes[place] = static_cast<int64_t>(xxh64(data, size, seed_));
    }
  }

  void flush(int64_t* codes) {
    xxh64_short_texts(texts_, count_, seed_, codes);
    count_ = 0;
  }

 private:
  uint64_t seed_;
  int count_ = 0;
  ShortText texts_[kBatch];
};

}  // namespace sparsekit
