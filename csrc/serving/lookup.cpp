// Looks up bags of keys: finds their rows, and pools them.
//
// Nearly all the time is spent waiting for memory: for a key's bucket, then for its row. Up to
// kChunk keys, from all features and bags in a call, are therefore processed together in three
// steps. The first step prefetches buckets, the second reads them and prefetches rows, and the
// third reads the rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/probe.h"
#include "serving/feature_checks.h"
#include "serving/handle.h"
#include "serving/message.h"
#include "serving/structs.h"
#include "sparsekit/initial_values.h"

namespace sparsekit::serving {
namespace {

// Maximum number of keys, and of bags, in a chunk. A longer bag is split into chunks at run ends.
constexpr int64_t kChunk = 2 * kSumRun;
// Maximum number of features with bags in the same chunk.
constexpr int64_t kMostParts = 64;
// Number of columns computed together when some keys have rows and others use initial vectors.
constexpr int64_t kColumns = 64;

// ---- vectors of keys without a row ----

int64_t fallback_of(const TableView& table, int64_t key) {
  const auto hash = static_cast<int64_t>(hash_key(key));
  const int64_t rest = hash % table.num_fallbacks;
  return kFirstFallback + (rest < 0 ? rest + table.num_fallbacks : rest);
}

// Computes columns [begin, end) of a key's initial vector, rounded to bfloat16 if the table has
// bfloat16 rows. In other row formats, initial vectors stay float32.
void initial_columns(const TableView& table, int64_t key, int64_t begin, int64_t end, float* out) {
  for (int64_t column = begin; column < end; column += 4) {
    float values[4];
    initial_values(table.initializer, key, column / 4, values);
    for (int64_t j = column; j < std::min(column + 4, end); ++j) {
      float value = values[j - column];
      if (table.row_format == SK_BFLOAT16) value = load(store<BFloat16>(value));
      out[j - begin] = value;
    }
  }
}

// ---- chunks ----

// Looks up one feature after another, in chunks that fit into buffers on the stack.
class Lookup {
 public:
  Lookup(const sk_snapshot& snapshot, const Version& version)
      : snapshot_(snapshot), kernels_(*snapshot.kernels), tables_(version.tables.data()) {}

  // Adds a feature, which must stay at its address until finish().
  int add(const sk_feature& feature) {
    const bool is_each = feature.offsets == nullptr || feature.combiner == SK_NONE;
    const int64_t* offsets = is_each ? nullptr : feature.offsets;
    const int64_t num_bags = is_each ? feature.num_keys : feature.num_bags;
    for (int64_t b = 0; b < num_bags;) {
      const int64_t keys_left = kChunk - num_keys_, bags_left = kChunk - num_bags_;
      int64_t end = num_parts_ == kMostParts ? b : std::min(num_bags, b + bags_left);
      if (is_each) {
        end = std::min(end, b + keys_left);
      } else {
        const auto fits = [=](int64_t last) { return offsets[last] - offsets[b] <= keys_left; };
        if (end > b && !fits(end)) {
          const int64_t most = end;
          for (end = b; end < most && fits(end + 1);) ++end;
        }
      }
      int status = SK_OK;
      if (end > b) {
        status = add_bags(feature, offsets, b, end);
        b = end;
      } else if (num_bags_ > 0) {  // go on with an empty chunk
        status = look_up();
      } else {
        status = look_up_long(feature, b);
        ++b;
      }
      if (status != SK_OK) return status;
    }
    return SK_OK;
  }

  // Looks up the last chunk.
  int finish() { return look_up(); }

 private:
  // A feature's bags in the chunk. The keys of its bags `bag`, bag + 1, ... end at
  // ends_[first_bag], ends_[first_bag + 1], ... in the chunk.
  struct Part {
    const sk_feature* feature;
    int64_t bag;
    int32_t first_key, num_keys;
    int32_t first_bag, num_bags;
    bool all_found;  // whether all keys have a row, or share one
  };

  // Adds the bags [begin, end), which must fit into the chunk.
  int add_bags(const sk_feature& feature, const int64_t* offsets, int64_t begin, int64_t end) {
    const int64_t first = offsets == nullptr ? begin : offsets[begin];
    const int64_t last = offsets == nullptr ? end : offsets[end];
    Part& part = parts_[num_parts_++];
    part = {&feature,
            begin,
            static_cast<int32_t>(num_keys_),
            0,
            static_cast<int32_t>(num_bags_),
            static_cast<int32_t>(end - begin),
            false};
    if (!tables_[feature.table].has_padding_key) {
      const int64_t shift = num_keys_ - first;
      for (int64_t b = begin; b < end; ++b) {
        const int64_t bag_end = offsets == nullptr ? b + 1 : offsets[b + 1];
        ends_[num_bags_++] = static_cast<int32_t>(bag_end + shift);
      }
      // Use loops: for the few keys in a small bag, calling memmove takes longer.
      for (int64_t i = first; i < last; ++i) keys_[i + shift] = feature.keys[i];
      if (feature.weights != nullptr) {
        for (int64_t i = first; i < last; ++i) weights_[i + shift] = feature.weights[i];
      }
      if (feature.found != nullptr) {
        for (int64_t i = first; i < last; ++i) places_[i + shift] = i;
      }
      num_keys_ += last - first;
    } else {
      for (int64_t b = begin, i = first; b < end; ++b) {
        for (const int64_t stop = offsets == nullptr ? b + 1 : offsets[b + 1]; i < stop; ++i) {
          add_key(feature, i);
        }
        ends_[num_bags_++] = static_cast<int32_t>(num_keys_);
      }
    }
    return ask(&part);
  }

  // Adds key i of a feature, unless it is padding.
  void add_key(const sk_feature& feature, int64_t i) {
    const TableView& table = tables_[feature.table];
    if (table.has_padding_key && feature.keys[i] == table.padding_key) {
      if (feature.found != nullptr) feature.found[i] = 0;
      return;
    }
    keys_[num_keys_] = feature.keys[i];
    places_[num_keys_] = i;
    if (feature.weights != nullptr) weights_[num_keys_] = feature.weights[i];
    ++num_keys_;
  }

  // Prefetches the buckets for a part's keys, which are the last keys in the chunk so far.
  int ask(Part* part) {
    const TableView& table = tables_[part->feature->table];
    part->num_keys = static_cast<int32_t>(num_keys_) - part->first_key;
    const int64_t* keys = keys_ + part->first_key;
    if (table.num_fallbacks > 0) {
      const int64_t* least = std::min_element(keys, keys + part->num_keys);
      if (part->num_keys > 0 && *least < kFirstFallback + table.num_fallbacks) {
        return refuse_fallback_key(table, *least);
      }
    }
    int64_t* homes = homes_ + part->first_key;
    for (int64_t e = 0; e < part->num_keys; ++e) {
      homes[e] = home_bucket(keys[e], table.index_seed, table.num_buckets);
      cpu::prefetch(&table.buckets[homes[e]]);
    }
    return SK_OK;
  }

  // Looks up the bags of the chunk, and empties it.
  int look_up() {
    for (int64_t p = 0; p < num_parts_; ++p) {
      if (int status = find_rows(&parts_[p])) return status;
    }
    for (int64_t p = 0; p < num_parts_; ++p) pool(parts_[p]);
    num_keys_ = num_bags_ = num_parts_ = 0;
    return SK_OK;
  }

  // Looks up a bag that is longer than a chunk, in chunks of its own.
  int look_up_long(const sk_feature& feature, int64_t bag) {
    LongBag sum;
    int64_t i = feature.offsets[bag];
    const int64_t end = feature.offsets[bag + 1];
    do {
      while (i < end && num_keys_ < kChunk) add_key(feature, i++);
      Part part = {&feature, bag, 0, 0, 0, 1, false};
      if (int status = ask(&part)) return status;
      if (int status = find_rows(&part)) return status;
      pool_long(part, &sum);
      num_keys_ = 0;
    } while (i < end);
    const TableView& table = tables_[feature.table];
    divide(feature, table.dim, sum, output(feature, table, bag));
    return SK_OK;
  }

  int refuse_fallback_key(const TableView& table, int64_t key) const {
    return fail(SK_BAD_ARGUMENT,
                "%s: table \"%s\": key %lld is one of the %lld smallest int64 numbers, which are "
                "keys of its fallback rows",
                snapshot_.path.c_str(), table.name, static_cast<long long>(key),
                static_cast<long long>(table.num_fallbacks));
  }

  // Finds the rows of a part's keys, and prefetches them. A null pointer means that the key has no
  // row.
  int find_rows(Part* part) {
    const sk_feature& feature = *part->feature;
    const TableView& table = tables_[feature.table];
    const int64_t* keys = keys_ + part->first_key;
    const int64_t* homes = homes_ + part->first_key;
    const uint8_t** rows = rows_ + part->first_key;
    const RowIndex index{table.buckets, table.num_buckets, table.rows, table.row_limit,
                         table.row_bytes};
    int64_t missed = kernels_.find(index, keys, homes, part->num_keys, rows);
    part->all_found = missed == 0;
    if (feature.found != nullptr) {
      for (int64_t e = 0; e < part->num_keys; ++e) {
        feature.found[places_[part->first_key + e]] = rows[e] != nullptr;
      }
    }
    if (missed == 0 || table.miss == SK_MISS_INITIAL || table.miss == SK_MISS_ZEROS) return SK_OK;
    for (int64_t e = 0; e < part->num_keys; ++e) {
      if (rows[e] != nullptr) continue;
      if (table.miss == SK_MISS_ERROR) {
        return fail(SK_UNKNOWN_KEY, "%s: table \"%s\" has no key %lld", snapshot_.path.c_str(),
                    table.name, static_cast<long long>(keys[e]));
      }
      const int64_t other = fallback_of(table, keys[e]);
      const int64_t home = home_bucket(other, table.index_seed, table.num_buckets);
      missed -= 1 - kernels_.find(index, &other, &home, 1, rows + e);
    }
    part->all_found = missed == 0;
    return SK_OK;
  }

  static float* output(const sk_feature& feature, const TableView& table, int64_t bag) {
    return feature.out + bag * (feature.out_stride == 0 ? table.dim : feature.out_stride);
  }

  // Returns true if any key at positions [begin, end) in the chunk has a vector that is not in the
  // table.
  bool has_absent(const sk_feature& feature, const TableView& table, int64_t begin,
                  int64_t end) const {
    // A sum skips null rows, which stand for zeros.
    const bool is_sum = feature.combiner != SK_MAX && feature.combiner != SK_NONE;
    if (is_sum && table.miss != SK_MISS_INITIAL) return false;
    return std::find(rows_ + begin, rows_ + end, nullptr) != rows_ + end;
  }

  // Pools the bags of a part.
  void pool(const Part& part) {
    const sk_feature& feature = *part.feature;
    const TableView& table = tables_[feature.table];
    const int32_t* ends = ends_ + part.first_bag;
    const int64_t stride = feature.out_stride == 0 ? table.dim : feature.out_stride;
    const PoolBags bags{table.row_format,
                        feature.combiner,
                        table.dim,
                        rows_,
                        feature.weights == nullptr ? nullptr : weights_,
                        stride,
                        false};
    if (part.all_found ||
        !has_absent(feature, table, part.first_key, ends_[part.first_bag + part.num_bags - 1])) {
      kernels_.pool(bags, part.first_key, ends, part.num_bags, feature.out + part.bag * stride);
      return;
    }
    int64_t begin = part.first_key;
    for (int64_t b = 0; b < part.num_bags; ++b) {
      const int64_t end = ends[b];
      float* out = feature.out + (part.bag + b) * stride;
      if (has_absent(feature, table, begin, end)) {
        LongBag sum;
        pool_runs(feature, table, begin, end, out, &sum);
        divide(feature, table.dim, sum, out);
      } else {
        kernels_.pool(bags, begin, &ends[b], 1, out);
      }
      begin = end;
    }
  }

  // A bag's number of keys and total weight so far, while it is pooled run by run.
  struct LongBag {
    int64_t num_keys = 0;
    float weight = 0;
  };

  // Adds the chunk's keys to a long bag.
  void pool_long(const Part& part, LongBag* bag) const {
    const sk_feature& feature = *part.feature;
    const TableView& table = tables_[feature.table];
    float* out = output(feature, table, part.bag);
    if (part.num_keys == 0 || has_absent(feature, table, 0, part.num_keys)) {
      pool_runs(feature, table, 0, part.num_keys, out, bag);
      return;
    }
    const float* weights = feature.weights == nullptr ? nullptr : weights_;
    PoolBags bags{table.row_format, feature.combiner, table.dim, rows_, weights, 0,
                  bag->num_keys > 0};
    if (feature.combiner != SK_MAX) bags.combiner = SK_SUM;  // divided at the end
    kernels_.pool(bags, 0, &part.num_keys, 1, out);
    for (int64_t run = 0; run < part.num_keys && weights != nullptr; run += kSumRun) {
      const int64_t n = std::min<int64_t>(kSumRun, part.num_keys - run);
      bag->weight += total_weight(weights + run, n, feature.combiner);
    }
    bag->num_keys += part.num_keys;
  }

  // Adds the chunk's keys [begin, end) to a bag, in runs, some columns at a time. Some of the
  // vectors may not be in the table.
  void pool_runs(const sk_feature& feature, const TableView& table, int64_t begin, int64_t end,
                 float* out, LongBag* bag) const {
    const bool is_max = feature.combiner == SK_MAX, is_none = feature.combiner == SK_NONE;
    if (begin == end && bag->num_keys == 0) std::fill_n(out, table.dim, 0.0F);
    for (int64_t run = begin; run < end; run += kSumRun) {
      const int64_t stop = std::min(run + kSumRun, end);
      const bool go_on = bag->num_keys > 0;
      for (int64_t first = 0; first < table.dim; first += kColumns) {
        const int64_t last = std::min(first + kColumns, table.dim);
        float pooled[kColumns] = {}, vector[kColumns];
        if (is_max && go_on) std::copy(out + first, out + last, pooled);
        for (int64_t e = run; e < stop; ++e) {
          columns_of(table, e, first, last, vector);
          if (is_none || (is_max && e == run && !go_on)) {
            std::copy_n(vector, last - first, pooled);
          } else if (is_max) {
            for (int64_t j = 0; j < last - first; ++j) {
              const float x = vector[j], most = pooled[j];
              if (x > most || (x != x && most == most)) pooled[j] = x;
            }
          } else if (feature.weights != nullptr) {
            for (int64_t j = 0; j < last - first; ++j) pooled[j] += weights_[e] * vector[j];
          } else {
            for (int64_t j = 0; j < last - first; ++j) pooled[j] += vector[j];
          }
        }
        if (go_on && !is_max) {
          for (int64_t j = first; j < last; ++j) out[j] += pooled[j - first];
        } else {
          std::copy_n(pooled, last - first, out + first);
        }
      }
      if (feature.weights != nullptr) {
        bag->weight += total_weight(weights_ + run, stop - run, feature.combiner);
      }
      bag->num_keys += stop - run;
    }
  }

  // Like total_weight() in csrc/core/cpu/bags.h, but for one run.
  static float total_weight(const float* weights, int64_t n, int32_t combiner) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += combiner == SK_MEAN ? weights[i] : weights[i] * weights[i];
    }
    return sum;
  }

  void columns_of(const TableView& table, int64_t e, int64_t first, int64_t last,
                  float* vector) const {
    if (rows_[e] != nullptr) {
      kernels_.decode(table.row_format, rows_[e], table.dim, first, last, vector);
    } else if (table.miss == SK_MISS_INITIAL) {
      initial_columns(table, keys_[e], first, last, vector);
    } else {
      std::fill_n(vector, last - first, 0.0F);
    }
  }

  // Divides a bag's sum, like divided() in csrc/core/cpu/bags.h.
  static void divide(const sk_feature& feature, int64_t dim, const LongBag& bag, float* out) {
    if (feature.combiner != SK_MEAN && feature.combiner != SK_SQRTN) return;
    const float total = feature.weights == nullptr ? static_cast<float>(bag.num_keys) : bag.weight;
    const float by = feature.combiner == SK_MEAN ? total : std::sqrt(total);
    if (by == 1) return;
    for (int64_t j = 0; j < dim; ++j) out[j] = by == 0 ? 0 : out[j] / by;
  }

  const sk_snapshot& snapshot_;
  const PoolKernels& kernels_;
  const TableView* tables_;
  int64_t num_keys_ = 0;
  int64_t num_bags_ = 0;
  int64_t num_parts_ = 0;
  int64_t keys_[kChunk];
  int64_t places_[kChunk];  // of a key in its feature, for `found`
  int64_t homes_[kChunk];
  const uint8_t* rows_[kChunk];
  float weights_[kChunk];
  int32_t ends_[kChunk];
  Part parts_[kMostParts];
};

}  // namespace
}  // namespace sparsekit::serving

using namespace sparsekit::serving;

int sk_lookup(sk_snapshot* snapshot, const sk_pin* pin, const sk_feature* features,
              int32_t num_features) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_lookup: snapshot is null");
  if (num_features < 0) {
    return fail(SK_BAD_ARGUMENT, "%s: sk_lookup: num_features is %d", snapshot->path.c_str(),
                num_features);
  }
  if (num_features > 0 && features == nullptr) {
    return fail(SK_BAD_ARGUMENT, "%s: sk_lookup: features is null", snapshot->path.c_str());
  }
  const Reading reading(snapshot, pin);
  if (reading.status() != SK_OK) return reading.status();
  const Checker checker(*snapshot, reading.version());
  for (int32_t f = 0; f < num_features; ++f) {
    if (features[f].size != sizeof(sk_feature)) {
      return fail(SK_BAD_ARGUMENT, "%s: sk_lookup: features[%d].size is %zu, but must be %zu",
                  snapshot->path.c_str(), f, features[f].size, sizeof(sk_feature));
    }
    if (int status = checker.check(features[f], f)) return status;
  }
  Lookup lookup(*snapshot, reading.version());
  for (int32_t f = 0; f < num_features; ++f) {
    if (int status = lookup.add(features[f])) return status;
  }
  return lookup.finish();
}
