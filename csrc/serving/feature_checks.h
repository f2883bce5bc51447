// Checks the arguments of a lookup.
#pragma once

#include <cstdint>

#include "serving/handle.h"
#include "serving/message.h"

namespace sparsekit::serving {

// Checks features; error messages name the argument and its value.
class Checker {
 public:
  Checker(const sk_snapshot& snapshot, const Version& version)
      : snapshot_(snapshot), version_(version) {}

  int check(const sk_feature& feature, int32_t number) const {
    const auto wrong = [&](const char* argument, int64_t value, const char* must) {
      return fail(SK_BAD_ARGUMENT, "%s: sk_lookup: features[%d].%s is %lld, but must be %s",
                  snapshot_.path.c_str(), number, argument, static_cast<long long>(value), must);
    };
    const auto null = [&](const char* argument) {
      return fail(SK_BAD_ARGUMENT, "%s: sk_lookup: features[%d].%s is null", snapshot_.path.c_str(),
                  number, argument);
    };
    const auto num_tables = static_cast<int64_t>(version_.tables.size());
    if (feature.table < 0 || feature.table >= num_tables) {
      return wrong("table", feature.table, "the number of a table");
    }
    if (feature.combiner < SK_SUM || feature.combiner > SK_MAX) {
      return wrong("combiner", feature.combiner, "an sk_combiner");
    }
    if (feature.num_keys < 0) return wrong("num_keys", feature.num_keys, "at least 0");
    if (feature.num_keys > 0 && feature.keys == nullptr) return null("keys");
    if (feature.weights != nullptr && (feature.combiner == SK_MAX || feature.combiner == SK_NONE)) {
      return fail(SK_BAD_ARGUMENT,
                  "%s: sk_lookup: features[%d].weights must be null, as its combiner is %s",
                  snapshot_.path.c_str(), number,
                  feature.combiner == SK_MAX ? "SK_MAX" : "SK_NONE");
    }
    const int64_t dim = version_.tables[feature.table].dim;
    if (feature.out_stride != 0 && feature.out_stride < dim) {
      return fail(SK_BAD_ARGUMENT,
                  "%s: sk_lookup: features[%d].out_stride is %lld, but dim is %lld",
                  snapshot_.path.c_str(), number, static_cast<long long>(feature.out_stride),
                  static_cast<long long>(dim));
    }
    int64_t vectors = feature.num_keys;
    if (feature.offsets != nullptr) {
      if (feature.num_bags < 0) return wrong("num_bags", feature.num_bags, "at least 0");
      if (int status = check_offsets(feature, number)) return status;
      if (feature.combiner != SK_NONE) vectors = feature.num_bags;
    }
    if (vectors > 0 && feature.out == nullptr) return null("out");
    return SK_OK;
  }

 private:
  int check_offsets(const sk_feature& feature, int32_t number) const {
    const int64_t* offsets = feature.offsets;
    const int64_t bags = feature.num_bags;
    const auto wrong = [&](int64_t b, const char* must, int64_t value) {
      return fail(SK_BAD_ARGUMENT,
                  "%s: sk_lookup: features[%d].offsets[%lld] is %lld, but must be %s%lld",
                  snapshot_.path.c_str(), number, static_cast<long long>(b),
                  static_cast<long long>(offsets[b]), must, static_cast<long long>(value));
    };
    if (offsets[0] != 0) return wrong(0, "", 0);
    bool falls = false;
    for (int64_t b = 0; b < bags; ++b) falls |= offsets[b + 1] < offsets[b];
    for (int64_t b = 0; falls; ++b) {
      if (offsets[b + 1] < offsets[b]) return wrong(b + 1, "at least ", offsets[b]);
    }
    if (offsets[bags] != feature.num_keys) return wrong(bags, "num_keys, ", feature.num_keys);
    return SK_OK;
  }

  const sk_snapshot& snapshot_;
  const Version& version_;
};

}  // namespace sparsekit::serving
