#include "serving/top_k.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <new>
#include <vector>

#include "cpu/probe.h"
#include "serving/handle.h"
#include "serving/include/sparsekit_serving.h"
#include "serving/message.h"
#include "serving/quantized_query.h"

namespace sparsekit::serving {
namespace {

// A set of a table's rows. A number that is not a row is never in it; inserting one has no effect.
class RowSet {
 public:
  explicit RowSet(int64_t limit) : limit_(limit), words_(limit / 64 + 1) {}

  // insert() and has() have no branches, since the processor could not predict where a bucket's
  // rows end.
  void insert(int32_t row) { words_[word(row)] |= bit(row); }
  bool has(int32_t row) const { return (words_[word(row)] & bit(row)) != 0; }
  void erase(int64_t row) { words_[row / 64] &= ~(uint64_t{1} << row % 64); }

  void insert_all() {
    std::fill(words_.begin(), words_.end(), ~uint64_t{0});
    words_.back() = (uint64_t{1} << limit_ % 64) - 1;
  }

  // Calls visit(rows, n) for all rows in ascending order, with up to kMostAtOnce rows per call.
  template <class Visit>
  void for_each(const Visit& visit) const {
    int32_t rows[kMostAtOnce];
    int64_t n = 0;
    for (size_t word = 0; word < words_.size(); ++word) {
      if (n > kMostAtOnce - 64) {
        visit(rows, n);
        n = 0;
      }
      for (uint64_t bits = words_[word]; bits != 0; bits &= bits - 1) {
        rows[n++] = static_cast<int32_t>(word * 64) + __builtin_ctzll(bits);
      }
    }
    if (n > 0) visit(rows, n);
  }

 private:
  bool is_row(int32_t row) const { return row >= 0 && row < limit_; }
  size_t word(int32_t row) const { return is_row(row) ? static_cast<size_t>(row) / 64 : 0; }
  uint64_t bit(int32_t row) const { return uint64_t{is_row(row)} << (row & 63); }

  int64_t limit_;
  std::vector<uint64_t> words_;
};

// Returns the rows that top_k compares.
RowSet rows_with_key(const TableView& table) {
  RowSet rows(table.row_limit);
  if (table.num_keys == table.row_limit) {
    rows.insert_all();  // saves the time to read the index
  } else {
    for (int64_t b = 0; b < table.num_buckets; ++b) {
      for (const int32_t row : table.buckets[b].rows) rows.insert(row);
    }
  }
  const auto leave_out = [&](int64_t key) {
    const int64_t home = home_bucket(key, table.index_seed, table.num_buckets);
    const int64_t row = cpu::find_from(table.buckets, table.num_buckets, home, key);
    if (row >= 0 && row < table.row_limit) rows.erase(row);
  };
  if (table.has_padding_key) leave_out(table.padding_key);
  for (int64_t i = 0; i < std::min(table.num_fallbacks, table.num_keys); ++i) {
    leave_out(kFirstFallback + i);
  }
  return rows;
}

// The rows that may be among the k best. Keys, which decide between equal scores, are looked up
// later: listing the keys of all rows would take longer than computing the scores.
class Contenders {
 public:
  explicit Contenders(int32_t k) : k_(static_cast<size_t>(k)) {}

  // Rows below this score are not among the best.
  float least() const {
    return best_.size() < k_ ? -std::numeric_limits<float>::infinity() : best_.front();
  }

  // Adds a row; rows must be added in ascending order.
  void add(float score, int32_t row) {
    if (!(score >= least())) return;  // NaN, too
    rows_.push_back({score, row});
    if (best_.size() == k_) {
      std::pop_heap(best_.begin(), best_.end(), std::greater<>());
      best_.pop_back();
    }
    best_.push_back(score);
    std::push_heap(best_.begin(), best_.end(), std::greater<>());
  }

  int32_t write(const TableView& table, int64_t* keys, float* scores) {
    const float limit = least();
    rows_.erase(std::remove_if(rows_.begin(), rows_.end(),
                               [&](const Row& row) { return row.score < limit; }),
                rows_.end());
    RowSet wanted(table.row_limit);
    for (const Row& row : rows_) wanted.insert(row.row);
    std::vector<Result> results;
    for (int64_t b = 0; b < table.num_buckets; ++b) {
      const Bucket& bucket = table.buckets[b];
      bool any = false;
      for (const int32_t row : bucket.rows) any |= wanted.has(row);
      if (!any) continue;
      for (int slot = 0; slot < kSlotsPerBucket; ++slot) {
        if (!wanted.has(bucket.rows[slot])) continue;
        const auto place = std::lower_bound(rows_.begin(), rows_.end(), bucket.rows[slot],
                                            [](const Row& a, int32_t b) { return a.row < b; });
        results.push_back({place->score, bucket.keys[slot]});
      }
    }
    const size_t found = std::min(results.size(), k_);
    std::partial_sort(results.begin(), results.begin() + found, results.end());
    for (size_t i = 0; i < found; ++i) {
      keys[i] = results[i].key;
      scores[i] = results[i].score;
    }
    return static_cast<int32_t>(found);
  }

 private:
  struct Row {
    float score;
    int32_t row;
  };
  struct Result {
    float score;
    int64_t key;

    bool operator<(const Result& other) const {
      return score != other.score ? score > other.score : key < other.key;
    }
  };

  size_t k_;
  std::vector<float> best_;  // a heap, the lowest score on top
  std::vector<Row> rows_;
};

// Unit roundoff of float.
constexpr double kRoundoff = 0x1p-24;
// Exceeds the absolute value of any column in int8 and int4 rows with finite scales and biases.
constexpr double kMostOfColumn = 65504.0 * 256;

double sum_of_magnitudes(const float* query, int64_t dim) {
  double sum = 0;
  for (int64_t j = 0; j < dim; ++j) sum += std::fabs(query[j]);
  return sum;
}

// Quantizes `query` into `integers`, and returns a query that points to them.
QuantizedQuery quantize(int32_t row_format, const float* query, int64_t dim,
                        std::vector<int16_t>* integers) {
  const bool is_int8 = row_format == SK_INT8;
  const int64_t most_of_row = is_int8 ? 255 : 15;
  float largest = 0;
  for (int64_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(query[j]));
  // Dot products must fit into int32.
  const int64_t most = std::min<int64_t>(32767, INT32_MAX / (most_of_row * dim));
  const double unit = largest == 0 ? 1 : static_cast<double>(largest) / static_cast<double>(most);
  integers->assign(dim + 1, 0);
  double sum = 0, residuals = 0;
  for (int64_t j = 0; j < dim; ++j) {
    const int64_t rounded = std::clamp<int64_t>(std::llround(query[j] / unit), -most, most);
    const int64_t place = is_int8 ? j : j / 2 + j % 2 * ((dim + 1) / 2);
    (*integers)[place] = static_cast<int16_t>(rounded);
    sum += query[j];
    residuals += std::fabs(query[j] - unit * static_cast<double>(rounded));
  }
  const double magnitudes = sum_of_magnitudes(query, dim);
  residuals += magnitudes * 0x1p-50;  // in case that they have been rounded to less
  // Each term of a score is rounded three times on its own (scale * u, + bias, * query), then once
  // in each addition in its lane and in each of four sums of lanes. The factor 1.01 covers products
  // of these errors, and the rounding errors of this computation, which uses double.
  const double roundings = static_cast<double>(3 + (dim + 15) / 16 + 4) * kRoundoff * 1.01;
  const double levels = static_cast<double>(most_of_row);
  return {integers->data(),
          dim,
          unit,
          sum,
          levels * (residuals + magnitudes * roundings),
          magnitudes * roundings,
          static_cast<double>(dim) * 0x1p-124};  // products that underflow, or are flushed to zero
}

}  // namespace

int32_t top_k(const PoolKernels& kernels, const TableView& table, const float* query, int32_t k,
              int64_t* keys, float* scores) {
  // The bounds on scores are valid only if no score overflows.
  const bool bounded = (table.row_format == SK_INT8 || table.row_format == SK_INT4) &&
                       sum_of_magnitudes(query, table.dim) * kMostOfColumn < 1e38;
  std::vector<int16_t> integers;
  QuantizedQuery quantized{};
  if (bounded) quantized = quantize(table.row_format, query, table.dim, &integers);
  const RowSet candidates = rows_with_key(table);
  Contenders contenders(k);
  // Read rows in memory order; reading them in index order takes four times as long.
  candidates.for_each([&](int32_t* rows, int64_t n) {
    const uint8_t* vectors[kMostAtOnce];
    for (int64_t i = 0; i < n; ++i) vectors[i] = table.rows + int64_t{rows[i]} * table.row_bytes;
    if (bounded) {
      int32_t selected[kMostAtOnce];
      n = kernels.select(table.row_format, vectors, n, quantized, contenders.least(), selected);
      for (int64_t i = 0; i < n; ++i) {
        vectors[i] = vectors[selected[i]];
        rows[i] = rows[selected[i]];
      }
    }
    float scores_of[kMostAtOnce];
    kernels.score(table.row_format, vectors, n, query, table.dim, scores_of);
    for (int64_t i = 0; i < n; ++i) contenders.add(scores_of[i], rows[i]);
  });
  return contenders.write(table, keys, scores);
}

}  // namespace sparsekit::serving

using namespace sparsekit::serving;

int sk_top_k(sk_snapshot* snapshot, const sk_pin* pin, int32_t table, const float* query, int32_t k,
             int64_t* keys, float* scores, int32_t* found) {
  if (snapshot == nullptr) return fail(SK_BAD_ARGUMENT, "sk_top_k: snapshot is null");
  const char* path = snapshot->path.c_str();
  const auto null = [&](const char* name) {
    return fail(SK_BAD_ARGUMENT, "%s: sk_top_k: %s is null", path, name);
  };
  if (query == nullptr) return null("query");
  if (keys == nullptr) return null("keys");
  if (scores == nullptr) return null("scores");
  if (found == nullptr) return null("found");
  if (k < 1) return fail(SK_BAD_ARGUMENT, "%s: sk_top_k: k is %d, but must be at least 1", path, k);
  const Reading reading(snapshot, pin);
  if (reading.status() != SK_OK) return reading.status();
  const std::vector<TableView>& tables = reading.version().tables;
  if (table < 0 || static_cast<size_t>(table) >= tables.size()) {
    return fail(SK_BAD_ARGUMENT, "%s: sk_top_k: table is %d, but there are %zu tables", path, table,
                tables.size());
  }
  const TableView& of = tables[table];
  for (int64_t j = 0; j < of.dim; ++j) {
    if (!std::isfinite(query[j])) {
      return fail(SK_BAD_ARGUMENT, "%s: sk_top_k: table \"%s\": query[%lld] is %g", path, of.name,
                  static_cast<long long>(j), query[j]);
    }
  }
  try {
    *found = top_k(*snapshot->kernels, of, query, k, keys, scores);
  } catch (const std::bad_alloc&) {
    return fail(SK_NO_MEMORY, "%s: sk_top_k: no memory for %lld rows", path,
                static_cast<long long>(of.num_keys));
  }
  return SK_OK;
}
