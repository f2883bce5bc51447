#include "sparsekit/xxh64.h"

#include "sparsekit/xxh64_steps.h"

namespace sparsekit {
namespace {

using namespace xxh64_steps;

constexpr size_t kStripe = 32;  // bytes per stripe: one 8-byte word for each of four accumulators

inline uint64_t merge(uint64_t hash, uint64_t accumulator) {
  return (hash ^ absorb(0, accumulator)) * kPrime1 + kPrime4;
}

// Processes all whole stripes of [p, end) and returns the four accumulators merged into one word.
// Not inlined: it needs many registers, which callers would save and restore needlessly for short
// strings.
[[gnu::noinline]] uint64_t hash_stripes(const uint8_t* p, const uint8_t* end, uint64_t seed) {
  uint64_t a = seed + kPrime1 + kPrime2;
  uint64_t b = seed + kPrime2;
  uint64_t c = seed;
  uint64_t d = seed - kPrime1;
  for (; static_cast<size_t>(end - p) >= kStripe; p += kStripe) {
    a = absorb(a, load64(p));
    b = absorb(b, load64(p + 8));
    c = absorb(c, load64(p + 16));
    d = absorb(d, load64(p + 24));
  }
  const uint64_t hash =
      rotate_left(a, 1) + rotate_left(b, 7) + rotate_left(c, 12) + rotate_left(d, 18);
  return merge(merge(merge(merge(hash, a), b), c), d);
}

}  // namespace

uint64_t xxh64(const void* data, size_t length, uint64_t seed) {
  const uint8_t* p = static_cast<const uint8_t*>(data);
  size_t left = length;

  uint64_t hash = seed + kPrime5;
  if (length >= kStripe) {
    hash = hash_stripes(p, p + length, seed);
    left = length % kStripe;
    p += length - left;
  }
  hash += length;

  for (; left >= 8; left -= 8, p += 8) hash = add8(hash, load64(p));
  if (left >= 4) {
    hash = add4(hash, load32(p));
    left -= 4;
    p += 4;
  }
  for (; left > 0; --left, ++p) hash = add1(hash, *p);
  return finish(hash);
}

}  // namespace sparsekit
