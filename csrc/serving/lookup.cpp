// Looks up bags of keys: finds their rows, and pools them.
//
// Nearly all time goes into waiting for memory: for a key's bucket, then for its row. Keys
// therefore go through three steps together, up to kChunk of them, over all features and bags of a
// call. The first step asks for buckets, the second one reads them and asks for rows, and the third
// one reads the rows.
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/probe.h"
#include "serving/handle.h"
#include "serving/message.h"
#include "serving/structs.h"
#include "sparsekit/initial_values.h"

namespace sparsekit::serving {
namespace {

// Sums are formed as in training (csrc/core/cpu/sum_rows.h): in runs of this length.
constexpr int64_t kSumRun = 256;
// Keys of a chunk. A bag that is longer begins a chunk, so that chunks cut it between runs.
constexpr int64_t kChunk = 2 * kSumRun;
// Bytes of a row to ask for before it is read. The processor itself asks for what follows.
constexpr int64_t kAskedBytes = 512;
// Columns that are computed together where rows and initial vectors mix.
constexpr int64_t kColumns = 64;
constexpr int64_t kFirstFallback = std::numeric_limits<int64_t>::min();

// ---- checks ----

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
                  "%s: sk_lookup: features[%d].offsets[%lld] is %lld, but must be %s %lld",
                  snapshot_.path.c_str(), number, static_cast<long long>(b),
                  static_cast<long long>(offsets[b]), must, static_cast<long long>(value));
    };
    if (offsets[0] != 0) return wrong(0, "", 0);
    bool falls = false;
    for (int64_t b = 0; b < bags; ++b) falls |= offsets[b + 1] < offsets[b];
    for (int64_t b = 0; falls; ++b) {
      if (offsets[b + 1] < offsets[b]) return wrong(b + 1, "at least", offsets[b]);
    }
    if (offsets[bags] != feature.num_keys) return wrong(bags, "num_keys,", feature.num_keys);
    return SK_OK;
  }

  const sk_snapshot& snapshot_;
  const Version& version_;
};

// ---- vectors of keys without a row ----

int64_t fallback_of(const TableView& table, int64_t key) {
  const auto hash = static_cast<int64_t>(hash_key(key));
  const int64_t rest = hash % table.num_fallbacks;
  return kFirstFallback + (rest < 0 ? rest + table.num_fallbacks : rest);
}

// Computes columns [begin, end) of a key's initial vector, as a table of this format would store
// it. Quantised and float16 rows are rounded only in the file.
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

// Looks up features one after another, in chunks on the stack.
class Lookup {
 public:
  Lookup(const sk_snapshot& snapshot, const Version& version)
      : snapshot_(snapshot), kernels_(*snapshot.kernels), tables_(version.tables.data()) {}

  // Adds a feature, which must stay where it is until finish().
  int add(const sk_feature& feature) {
    const TableView& table = tables_[feature.table];
    if (feature.offsets == nullptr || feature.combiner == SK_NONE) {
      for (int64_t i = 0; i < feature.num_keys; ++i) {
        if (int status = add_bag(feature, table, i, i, i + 1)) return status;
      }
      return SK_OK;
    }
    for (int64_t b = 0; b < feature.num_bags; ++b) {
      const int64_t* ends = feature.offsets + b;
      if (int status = add_bag(feature, table, b, ends[0], ends[1])) return status;
    }
    return SK_OK;
  }

  // Looks up all that is left.
  int finish() { return look_up(num_keys_); }

 private:
  // A bag, or a part of one that is longer than a chunk.
  struct Piece {
    const sk_feature* feature;
    int64_t bag;
    int32_t end;  // in the chunk; it begins where the piece before ends
    bool is_first, is_last;
  };

  // Adds the keys [begin, end) of a feature, which are bag number `bag`.
  int add_bag(const sk_feature& feature, const TableView& table, int64_t bag, int64_t begin,
              int64_t end) {
    int64_t start = num_keys_;  // of the bag in the chunk
    bool is_first = true;
    for (int64_t i = begin;;) {
      i = add_keys(feature, table, i, end);
      if (i == end) break;
      if (start == 0) {  // the bag fills the chunk
        pieces_[num_pieces_++] = {&feature, bag, static_cast<int32_t>(kChunk), is_first, false};
        is_first = false;
        start = kChunk;
      }
      if (int status = look_up(start)) return status;
      start = 0;
    }
    if (num_keys_ > start) {
      pieces_[num_pieces_++] = {&feature, bag, static_cast<int32_t>(num_keys_), is_first, true};
    } else {  // the bag is empty; one that was cut has at least one key after the cut
      std::fill_n(output(feature, table, bag), table.dim, 0.0F);
    }
    return SK_OK;
  }

  // Adds keys from `i` on, up to `end`, and asks for their buckets. Returns the first key that
  // finds no room.
  int64_t add_keys(const sk_feature& feature, const TableView& table, int64_t i, int64_t end) {
    const bool has_padding = table.has_padding_key;
    const int64_t padding = table.padding_key, seed = table.index_seed, size = table.num_buckets;
    const Bucket* buckets = table.buckets;
    const int64_t* keys = feature.keys;
    const float* weights = feature.weights;
    int64_t n = num_keys_;
    for (; i < end; ++i) {
      const int64_t key = keys[i];
      if (has_padding && key == padding) {
        if (feature.found != nullptr) feature.found[i] = 0;
        continue;
      }
      if (n == kChunk) break;
      const int64_t home = home_bucket(key, seed, size);
      cpu::prefetch(&buckets[home]);
      keys_[n] = key;
      homes_[n] = home;
      places_[n] = i;
      if (weights != nullptr) weights_[n] = weights[i];
      ++n;
    }
    num_keys_ = n;
    return i;
  }

  // Looks up the pieces, which hold the first n keys. The others then are the first ones.
  int look_up(int64_t n) {
    int32_t begin = 0;
    for (int64_t p = 0; p < num_pieces_;) {
      const sk_feature* feature = pieces_[p].feature;
      do ++p;
      while (p < num_pieces_ && pieces_[p].feature == feature);
      if (int status = find_rows(*feature, begin, pieces_[p - 1].end)) return status;
      begin = pieces_[p - 1].end;
    }
    begin = 0;
    for (int64_t p = 0; p < num_pieces_; ++p) {
      pool(pieces_[p], begin);
      begin = pieces_[p].end;
    }
    const int64_t left = num_keys_ - n;
    std::copy_n(keys_ + n, left, keys_);
    std::copy_n(places_ + n, left, places_);
    std::copy_n(weights_ + n, left, weights_);
    std::copy_n(homes_ + n, left, homes_);
    num_keys_ = left;
    num_pieces_ = 0;
    return SK_OK;
  }

  // Finds the rows of keys of one feature, and asks for them.
  int find_rows(const sk_feature& feature, int64_t begin, int64_t end) {
    const TableView& table = tables_[feature.table];
    const int64_t asked = std::min(table.row_bytes, kAskedBytes), limit = table.row_limit;
    const int64_t first_of_users = kFirstFallback + table.num_fallbacks;
    kernels_.find(table.buckets, homes_ + begin, keys_ + begin, end - begin, numbers_ + begin);
    for (int64_t e = begin; e < end; ++e) {
      int64_t row = numbers_[e];
      if (keys_[e] < first_of_users) return refuse_fallback_key(table, keys_[e]);
      if (row == kSearchOn || row >= limit) row = row_of(table, keys_[e], homes_[e]);
      if (feature.found != nullptr) feature.found[places_[e]] = row >= 0;
      if (row < 0) {
        if (int status = row_of_miss(table, keys_[e], &row)) return status;
      }
      rows_[e] = nullptr;
      if (row < 0) continue;
      const uint8_t* bytes = table.rows + row * table.row_bytes;
      rows_[e] = bytes;
      for (int64_t at = 0; at < asked; at += 64) cpu::prefetch(bytes + at);
      cpu::prefetch(bytes + asked - 1);
    }
    return SK_OK;
  }

  int refuse_fallback_key(const TableView& table, int64_t key) const {
    return fail(SK_BAD_ARGUMENT,
                "%s: table \"%s\": key %lld is one of the %lld smallest int64 numbers, which are "
                "keys of its fallback rows",
                snapshot_.path.c_str(), table.name, static_cast<long long>(key),
                static_cast<long long>(table.num_fallbacks));
  }

  static int64_t row_of(const TableView& table, int64_t key, int64_t home) {
    const int64_t row = cpu::find_from(table.buckets, table.num_buckets, home, key);
    return row < table.row_limit ? row : -1;
  }

  // Finds the row that stands for a key without a row; *row stays -1 if there is none.
  int row_of_miss(const TableView& table, int64_t key, int64_t* row) const {
    if (table.miss == SK_MISS_ERROR) {
      return fail(SK_UNKNOWN_KEY, "%s: table \"%s\" has no key %lld", snapshot_.path.c_str(),
                  table.name, static_cast<long long>(key));
    }
    if (table.miss == SK_MISS_FALLBACK) {
      const int64_t other = fallback_of(table, key);
      *row = row_of(table, other, home_bucket(other, table.index_seed, table.num_buckets));
    }
    return SK_OK;
  }

  static float* output(const sk_feature& feature, const TableView& table, int64_t bag) {
    return feature.out + bag * (feature.out_stride == 0 ? table.dim : feature.out_stride);
  }

  // Pools the rows of a piece that begins at `begin` in the chunk.
  void pool(const Piece& piece, int64_t begin) {
    const sk_feature& feature = *piece.feature;
    const TableView& table = tables_[feature.table];
    float* out = output(feature, table, piece.bag);
    if (piece.is_first) {
      bag_keys_ = 0;
      bag_weight_ = 0;
    }
    bool go_on = !piece.is_first;
    for (int64_t run = begin; run < piece.end; run += kSumRun) {
      const int64_t end = std::min<int64_t>(run + kSumRun, piece.end);
      pool_run(feature, table, run, end, out, go_on);
      go_on = true;
    }
    if (piece.is_last && feature.combiner != SK_NONE && feature.combiner != SK_MAX) {
      divide(feature, table.dim, out);
    }
  }

  void pool_run(const sk_feature& feature, const TableView& table, int64_t begin, int64_t end,
                float* out, bool go_on) {
    const float* weights = feature.weights == nullptr ? nullptr : weights_ + begin;
    const PoolRows rows{table.row_format, table.dim, rows_ + begin, weights, end - begin};
    const bool takes_all = feature.combiner == SK_MAX || feature.combiner == SK_NONE;
    const bool mixes = (takes_all || table.miss == SK_MISS_INITIAL) &&
                       std::find(rows_ + begin, rows_ + end, nullptr) != rows_ + end;
    if (mixes) {
      pool_mixed(feature, table, begin, end, out, go_on);
    } else if (feature.combiner == SK_NONE) {
      kernels_.decode(table.row_format, rows_[begin], table.dim, 0, table.dim, out);
    } else if (feature.combiner == SK_MAX) {
      kernels_.max(rows, out, go_on);
    } else {
      kernels_.sum(rows, out, go_on);
    }
    if (weights != nullptr) bag_weight_ += total_weight(weights, end - begin, feature.combiner);
    bag_keys_ += end - begin;
  }

  // As total_weight() in csrc/core/cpu/bags.h, of one run.
  static float total_weight(const float* weights, int64_t n, int32_t combiner) {
    float sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += combiner == SK_MEAN ? weights[i] : weights[i] * weights[i];
    }
    return sum;
  }

  // Pools a run in which keys without a row have vectors of their own, some columns at a time.
  void pool_mixed(const sk_feature& feature, const TableView& table, int64_t begin, int64_t end,
                  float* out, bool go_on) const {
    const bool is_max = feature.combiner == SK_MAX, is_none = feature.combiner == SK_NONE;
    for (int64_t first = 0; first < table.dim; first += kColumns) {
      const int64_t last = std::min(first + kColumns, table.dim);
      float pooled[kColumns] = {}, vector[kColumns];
      if (is_max && go_on) std::copy(out + first, out + last, pooled);
      for (int64_t e = begin; e < end; ++e) {
        columns_of(table, e, first, last, vector);
        if (is_none || (is_max && e == begin && !go_on)) {
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

  // Divides the sum of a bag as divided() in csrc/core/cpu/bags.h.
  void divide(const sk_feature& feature, int64_t dim, float* out) const {
    if (feature.combiner == SK_SUM) return;
    const float total = feature.weights == nullptr ? static_cast<float>(bag_keys_) : bag_weight_;
    const float by = feature.combiner == SK_MEAN ? total : std::sqrt(total);
    if (by == 1) return;
    for (int64_t j = 0; j < dim; ++j) out[j] = by == 0 ? 0 : out[j] / by;
  }

  const sk_snapshot& snapshot_;
  const PoolKernels& kernels_;
  const TableView* tables_;
  int64_t num_keys_ = 0;
  int64_t num_pieces_ = 0;
  int64_t bag_keys_ = 0;  // of the bag that is being pooled, in its pieces so far
  float bag_weight_ = 0;
  int64_t keys_[kChunk];
  int64_t places_[kChunk];  // of a key in its feature
  int64_t homes_[kChunk];
  int32_t numbers_[kChunk];  // of rows
  const uint8_t* rows_[kChunk];
  float weights_[kChunk];
  Piece pieces_[kChunk];
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
