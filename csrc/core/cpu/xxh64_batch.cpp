#include <atomic>
#include <cstring>
#include <iterator>

#include "cpu/xxh64_engines.h"
#include "sparsekit/xxh64.h"
#include "sparsekit/xxh64_steps.h"

namespace sparsekit {
namespace xxh64_portable {
namespace {

using namespace xxh64_steps;
#define SPARSEKIT_TARGET
#define SPARSEKIT_INLINE inline
using Lanes = uint64_t;
constexpr int kLanes = 1;
constexpr int kSide = 4;

SPARSEKIT_INLINE Lanes times(Lanes x, uint64_t factor) {
  return x * factor;
}
SPARSEKIT_INLINE Lanes times_small(Lanes x, uint64_t factor) {
  return x * factor;
}

template <bool>
SPARSEKIT_INLINE void load_words(const WaitingText* text, size_t first, size_t second,
                                 Lanes* words) {
  const auto* p = reinterpret_cast<const uint8_t*>(text->data);
  words[0] = load64(p + first);
  words[1] = load64(p + second);
}

SPARSEKIT_INLINE Lanes lanes_of(const uint64_t* words) {
  return words[0];
}

SPARSEKIT_INLINE void store(Lanes hash, const WaitingText* text, int64_t* codes) {
  codes[text->place] = static_cast<int64_t>(hash);
}

#include "cpu/xxh64_together.h"

}  // namespace
}  // namespace xxh64_portable

namespace {

struct Engine {
  const char* name;
  bool (*is_supported)();
  HashTogether hash_together;
};

constexpr Engine kEngines[] = {
#ifdef SPARSEKIT_HAS_X86_ENGINES
    {"avx512", xxh64_avx512::is_supported, xxh64_avx512::hash_together},
    {"avx2", xxh64_avx2::is_supported, xxh64_avx2::hash_together},
#else
    {"avx512", [] { return false; }, nullptr},
    {"avx2", [] { return false; }, nullptr},
#endif
    {"portable", [] { return true; }, xxh64_portable::hash_together},
};

const Engine* first_supported(const Engine* engine) {
  while (!engine->is_supported()) ++engine;
  return engine;
}

std::atomic<const Engine*> engine_in_use{first_supported(kEngines)};

}  // namespace

const char* use_xxh64_engine(const char* wanted) {
  const Engine* engine = kEngines;
  while (std::strcmp(engine->name, wanted) != 0) {
    if (++engine == std::end(kEngines)) return nullptr;
  }
  engine_in_use = first_supported(engine);
  return engine_in_use.load()->name;
}

HashTogether xxh64_engine() {
  return engine_in_use.load()->hash_together;
}

}  // namespace sparsekit
