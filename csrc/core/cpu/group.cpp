#include "sparsekit/group.h"

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cpu/first_bad.h"

namespace sparsekit::cpu {
namespace {

constexpr int64_t kGrain = 65536;

inline bool is_bad_bag(int64_t low, int64_t high, int64_t n, int64_t most) {
  // Use unsigned arithmetic, since the difference of invalid offsets may overflow.
  const uint64_t length = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
  return (high < low) | (high > n) | (length > static_cast<uint64_t>(most));
}

// Checks the offsets of the bags [begin, end). The loop has no branches and computes in the
// offsets' type, so that the compiler can vectorize it.
template <class Offset>
bool good_offsets(const Offset* offsets, int64_t begin, int64_t end, int64_t n, int64_t most) {
  using Length = std::make_unsigned_t<Offset>;
  const auto last = static_cast<Offset>(std::min<int64_t>(n, std::numeric_limits<Offset>::max()));
  const auto longest = static_cast<Length>(
      std::min(static_cast<uint64_t>(most), uint64_t{std::numeric_limits<Length>::max()}));
  Length bad = 0;
  for (int64_t b = begin; b < end; ++b) {
    const Offset low = offsets[b], high = offsets[b + 1];
    const Length length = static_cast<Length>(high) - static_cast<Length>(low);
    bad |= static_cast<Length>((high < low) | (high > last) | (length > longest));
  }
  return bad == 0;
}

template <class Key>
bool good_keys(const Key* keys, int64_t begin, int64_t end, uint64_t limit) {
  bool bad = false;
  for (int64_t i = begin; i < end; ++i) {
    bad |= static_cast<uint64_t>(static_cast<int64_t>(keys[i])) >= limit;
  }
  return !bad;
}

}  // namespace

BagCheck check_bags(const Source& source, int64_t first, int64_t last, int64_t most,
                    const ParallelFor& parallel_for) {
  if (first >= last) return {};
  if (source.offsets == nullptr) {
    return most >= 1 ? BagCheck{} : BagCheck{BadBag::kTooLong, first};
  }
  FirstBad bad;
  parallel_for(first, last, kGrain, [&](int64_t begin, int64_t end) {
    const bool good =
        source.wide_offsets
            ? good_offsets(static_cast<const int64_t*>(source.offsets), begin, end, source.n, most)
            : good_offsets(static_cast<const int32_t*>(source.offsets), begin, end, source.n, most);
    if (good) return;
    for (int64_t b = begin; b < end; ++b) {
      if (is_bad_bag(source.offset(b), source.offset(b + 1), source.n, most)) return bad.report(b);
    }
  });
  const int64_t bag = bad.position();
  if (bag < 0) return {};
  const int64_t low = source.offset(bag), high = source.offset(bag + 1);
  if (high < low || high > source.n) return {BadBag::kOffset, bag + 1};
  return {BadBag::kTooLong, bag};
}

int64_t check_keys(const Source& source, int64_t first, int64_t last, int64_t end_key,
                   const ParallelFor& parallel_for) {
  const auto limit = static_cast<uint64_t>(end_key);
  FirstBad bad;
  parallel_for(first, last, kGrain, [&](int64_t begin, int64_t end) {
    const bool good = source.wide_keys
                          ? good_keys(static_cast<const int64_t*>(source.keys), begin, end, limit)
                          : good_keys(static_cast<const int32_t*>(source.keys), begin, end, limit);
    if (good) return;
    for (int64_t i = begin; i < end; ++i) {
      if (static_cast<uint64_t>(source.key(i)) >= limit) return bad.report(i);
    }
  });
  return bad.position();
}

void write_bags(const Source* sources, const Feature* features, int64_t num_features, int32_t* bags,
                int64_t* key_starts, const ParallelFor& parallel_for) {
  int64_t entries = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const Feature& feature = features[f];
    const Source source = sources[feature.source];
    const int64_t first_bag = feature.first_bag, shift = feature.first_entry - feature.key_start;
    parallel_for(0, feature.bags, kGrain, [=](int64_t begin, int64_t end) {
      const auto write = [=](const auto* offsets) {
        for (int64_t b = begin; b < end; ++b) {
          bags[b] = static_cast<int32_t>(offsets[first_bag + b] + shift);
        }
      };
      if (source.offsets == nullptr) {
        for (int64_t b = begin; b < end; ++b) {
          bags[b] = static_cast<int32_t>(first_bag + b + shift);
        }
      } else if (source.wide_offsets) {
        write(static_cast<const int64_t*>(source.offsets));
      } else {
        write(static_cast<const int32_t*>(source.offsets));
      }
    });
    bags += feature.bags;
    key_starts[f] = feature.key_start;
    entries = feature.first_entry + feature.n;
  }
  *bags = static_cast<int32_t>(entries);
}

}  // namespace sparsekit::cpu
