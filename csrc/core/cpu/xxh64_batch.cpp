#include "sparsekit/xxh64_batch.h"

namespace sparsekit {

void xxh64_short_texts(const ShortText* texts, int count, uint64_t seed, int64_t* codes) {
  for (int k = 0; k < count; ++k) {
    codes[texts[k].place] = static_cast<int64_t>(xxh64(texts[k].data, texts[k].size, seed));
  }
}

}  // namespace sparsekit
