// Pooling of the rows of many tables at once, and its gradients.
#pragma once

#include <cstdint>
#include <functional>

#include "sparsekit/embedding_bag.h"
#include "sparsekit/entry_numbers.h"
#include "sparsekit/init_rows.h"
#include "sparsekit/parallel.h"
#include "sparsekit/update_rows.h"

namespace sparsekit {

// The part of a table that pooling reads.
template <class T>
struct PooledTable {
  const T* weight;
  int64_t num_rows, dim;
  int64_t stride;  // row r begins at weight + r * stride; rows may overlap
  // [num_listed], or null. With it, what is given for an entry is not its row but the row's
  // position here.
  const int32_t* rows;
  int64_t num_listed;
  // Entries with a negative row read the initial vector of this seed; zeros if it is null.
  const int64_t* seed;
  Initializer initializer;  // without its seed
};

// The bags of a feature, one vector for each: bag b's begins at out + b * stride, its gradient at
// grad + b * stride.
template <class T>
struct FeatureBags {
  int64_t table, num_bags;
  EntryNumbers bags;  // [num_bags + 1] the entry at which each bag begins, and the end
  Combiner combiner;
  T* out;
  const T* grad;
  int64_t stride;
  // All weights of the source, or null; the feature's own begin at key_start.
  const Acc<T>* sample_weights;
  const void* keys;
  bool wide_keys;
  int64_t num_keys;
  const int64_t* key_start;  // null: at 0
  int64_t max_nnz;           // on a device

  int64_t first_entry() const { return bags[0]; }
  int64_t num_entries() const { return bags[num_bags] - bags[0]; }
  // True if all vectors are aligned to `width` elements where the first one is.
  bool keeps_alignment(int64_t width) const { return num_bags <= 1 || stride % width == 0; }
  SPARSEKIT_HOST_DEVICE int64_t first() const { return key_start == nullptr ? 0 : *key_start; }
  SPARSEKIT_HOST_DEVICE int64_t key(int64_t i) const {
    return wide_keys ? static_cast<const int64_t*>(keys)[i] : static_cast<const int32_t*>(keys)[i];
  }
};

// Gradients of a table begin at a multiple of this many elements, for loads of many in one.
constexpr int64_t kPartElements = 16;

// Inputs of the gradient of one table.
template <class T>
struct SummedTable {
  const FeatureBags<T>* features;
  int64_t num_features;
  int64_t first_entry, n;
  int64_t num_rows, dim;  // of the gradient
  T* grad;                // [num_rows, dim]
  // [num_rows], or null. With it, gradients come in the order of these rows, which is written to
  // sorted_rows [num_rows].
  const int32_t* rows;
  int64_t* sorted_rows;
};

// Takes the gradient of a table from the thread that summed it, while it is in the cache: grad
// [num_rows, dim] of the int64 `rows` [num_rows], neither of which stays. Called for several tables
// at a time, each with the threads that it may use. Must not throw.
template <class T>
class GradientTaker {
 public:
  template <class F>
  explicit GradientTaker(F& take)
      : take_([](int64_t table, const int64_t* rows, const T* grad, const ParallelFor& parallel_for,
                 void* context) { (*static_cast<F*>(context))(table, rows, grad, parallel_for); }),
        context_(&take) {}

  void operator()(int64_t table, const int64_t* rows, const T* grad,
                  const ParallelFor& parallel_for) const {
    take_(table, rows, grad, parallel_for, context_);
  }

 private:
  void (*take_)(int64_t, const int64_t*, const T*, const ParallelFor&, void*);
  void* context_;
};

// Output of all tables: the sum for row r of table t begins at out + r * row_strides[t].
template <class T>
struct SumRoom {
  T* out;
  int64_t elements;            // of out
  const int64_t* row_strides;  // [tables]

  // Number of rows whose vector of `dim` elements fits within out.
  int64_t num_rows(int64_t t, int64_t dim) const {
    return elements < dim ? 0 : (elements - dim) / row_strides[t] + 1;
  }
};

namespace cpu {

// Bytes of workspace for group_embedding_bag, aligned to 64; without initial vectors, 8 for each
// feature and 8 more.
template <class T>
int64_t group_embedding_bag_workspace_bytes(const PooledTable<T>* tables,
                                            const FeatureBags<T>* features, int64_t num_features,
                                            const ParallelFor& parallel_for);

// Pools the bags of all features. index[e] is the row of entry e, or a position in its table's
// `rows`; bags are as wide as index. Returns -1, or an entry of which there is no such row; the
// result is then undefined.
template <class T>
int64_t group_embedding_bag(const PooledTable<T>* tables, const FeatureBags<T>* features,
                            int64_t num_features, EntryNumbers index, void* workspace,
                            const ParallelFor& parallel_for);

// Bytes of workspace, aligned to 64, for group_embedding_bag_backward, with a taker or without;
// `order` [tables] is for both of them.
template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>* tables,
                                                     int64_t num_tables, int32_t* order,
                                                     const ParallelFor& parallel_for,
                                                     bool has_taker = false);

// Gradients of the rows of all tables, each as embedding_bag_backward of its entries makes it, then
// divided by `divisor`. index[e] is the number of entry e's row in its table; a negative one is
// left out. Returns -1, or the first entry whose number is >= num_rows.
//
// With a taker, gradients go to it, in the order of `rows`, and grad and sorted_rows are not looked
// at; a bad entry is then found before anything is taken.
template <class T>
int64_t group_embedding_bag_backward(const SummedTable<T>* tables, int64_t num_tables,
                                     EntryNumbers index, int64_t divisor, int32_t* order,
                                     void* workspace, const ParallelFor& parallel_for,
                                     const GradientTaker<T>* taker = nullptr);

}  // namespace cpu

// As on the CPU. Bags that are bad are taken for what lies within `entries`, an entry without such
// a row for one without a row; it is reported in *bad_index or bag_errors. counts [tables] is how
// many of `rows` [entries] each table has from its first entry on; those of PooledTable are not
// looked at, nor is first_entry of SummedTable. A feature has no more entries than max_nnz for each
// bag.
namespace cuda {

template <class T>
struct GroupPooling {
  const PooledTable<T>* tables;
  int64_t num_tables;
  const FeatureBags<T>* features;
  int64_t num_features, entries;
  const int32_t* index;   // [entries]
  const int32_t* rows;    // [entries], or null
  const int64_t* counts;  // [num_tables], or null
};

template <class T>
int64_t group_embedding_bag_workspace_bytes(const GroupPooling<T>& call);

template <class T>
void group_embedding_bag(const GroupPooling<T>& call, int64_t* bad_row, int64_t* bad_index,
                         void* workspace, void* stream);

// Summands of the gradients of all tables. Features lie table by table, and so do their bags,
// gradients and sorted rows.
template <class T>
struct GroupSums {
  const SummedTable<T>* tables;
  int64_t num_tables, entries;
  const int32_t* bags;    // [bags of all features + 1]
  const int32_t* index;   // [entries]
  const int32_t* rows;    // [entries], or null
  const int64_t* counts;  // [num_tables]
  int64_t divisor;
};

template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const GroupSums<T>& sums);

// Sums go in order, whatever the size.
template <class T>
void group_embedding_bag_backward(const GroupSums<T>& sums, int64_t* bad_index, void* workspace,
                                  void* stream);

template <class T>
int64_t group_embedding_bag_backward_at_workspace_bytes(const GroupSums<T>& sums);

// The same sums, of sums.rows, to other places. Of sums.tables grad is not looked at, and num_rows
// is the most rows that there may be; a table has no more than entries, whatever counts say. Sums
// of a row that there is not are left out; it is reported in *bad_row, by its position among the
// rows of all tables. Nobody waits for the number of rows.
template <class T>
void group_embedding_bag_backward_at(const GroupSums<T>& sums, const SumRoom<T>& room,
                                     int64_t* bad_index, int64_t* bad_row, void* workspace,
                                     void* stream);

template <class T>
int64_t group_embedding_bag_update_workspace_bytes(const GroupSums<T>& sums);

// An optimizer's step with the gradients, as group_embedding_bag_backward sums them and update_rows
// takes them, without either in memory: only sums of rows with entries far apart get there. Nobody
// waits for their number. Of sums.tables grad is not looked at, and num_rows is the most rows that
// there may be; a table has no more than entries, whatever counts say. Positions in *bad_row count
// the distinct rows of a table. before_changes() is called when the launches that look at `index`
// have been made and nothing is changed yet; it may throw.
template <class Rule, class T>
void group_embedding_bag_update(const GroupSums<T>& sums, const SteppedTable<T>* tables,
                                const Rule& rule, StepNumber number, Rounding rounding,
                                int64_t* bad_index, int64_t* bad_row,
                                const std::function<void()>& before_changes, void* workspace,
                                void* stream);

}  // namespace cuda
}  // namespace sparsekit
