// Pools the rows of many tables at once; computes the gradients of pooling.
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
  // [num_listed], or null. If given, `index` holds positions in this list instead of rows.
  const int32_t* rows;
  int64_t num_listed;
  // Entries with a negative row read the initial vector of this seed, or zeros if it is null.
  const int64_t* seed;
  Initializer initializer;  // without its seed
};

// The bags of a feature. The vector of bag b begins at out + b * stride, its gradient at grad + b *
// stride.
template <class T>
struct FeatureBags {
  int64_t table, num_bags;
  EntryNumbers bags;  // [num_bags + 1] the entry at which each bag begins; the last one is the end
  Combiner combiner;
  T* out;
  const T* grad;
  int64_t stride;
  // Weights of the whole source, or null; the feature's own begin at key_start.
  const Acc<T>* sample_weights;
  const void* keys;
  bool wide_keys;
  int64_t num_keys;
  const int64_t* key_start;  // null means 0
  int64_t max_nnz;           // read only on a device

  int64_t first_entry() const { return bags[0]; }
  int64_t num_entries() const { return bags[num_bags] - bags[0]; }
  // Returns true if all vectors are aligned to `width` elements whenever the first one is.
  bool keeps_alignment(int64_t width) const { return num_bags <= 1 || stride % width == 0; }
  SPARSEKIT_HOST_DEVICE int64_t first() const { return key_start == nullptr ? 0 : *key_start; }
  SPARSEKIT_HOST_DEVICE int64_t key(int64_t i) const {
    return wide_keys ? static_cast<const int64_t*>(keys)[i] : static_cast<const int32_t*>(keys)[i];
  }
};

// Gradients of a table begin at a multiple of this many elements, so that they can be loaded in
// vectors.
constexpr int64_t kPartElements = 16;

// Inputs of the gradient of one table.
template <class T>
struct SummedTable {
  const FeatureBags<T>* features;
  int64_t num_features;
  int64_t first_entry, n;
  int64_t num_rows, dim;  // shape of the gradient
  T* grad;                // [num_rows, dim]
  // [num_rows], or null. If given, gradients are written in ascending order of these rows, which
  // are written to sorted_rows [num_rows].
  const int32_t* rows;
  int64_t* sorted_rows;
};

// Consumes the gradient of a table on the thread that summed it, while it is in the cache: grad
// [num_rows, dim] of the int64 `rows` [num_rows]. Both arrays are reused after the call. Called for
// several tables at a time, each with the threads that it may use. Must not throw.
template <class T>
using GradientTaker = std::function<void(int64_t table, const int64_t* rows, const T* grad,
                                         const ParallelFor& parallel_for)>;

// Output for the sums of all tables: the sum for row r of table t begins at out + r *
// row_strides[t].
template <class T>
struct SumRoom {
  T* out;
  int64_t elements;            // number of elements of `out`
  const int64_t* row_strides;  // [tables]

  // Returns the number of rows of table t whose vector of `dim` elements fits within out.
  int64_t num_rows(int64_t t, int64_t dim) const {
    return elements < dim ? 0 : (elements - dim) / row_strides[t] + 1;
  }
};

namespace cpu {

// Returns the bytes of workspace for group_embedding_bag, aligned to 64: without initial vectors, 8
// for each feature and 8 more.
template <class T>
int64_t group_embedding_bag_workspace_bytes(const PooledTable<T>* tables,
                                            const FeatureBags<T>* features, int64_t num_features,
                                            const ParallelFor& parallel_for);

// Pools the bags of all features. index[e] is the row of entry e, or a position in its table's
// `rows`; bags are as wide as index. Returns -1, or an entry whose row or position does not exist;
// the result is then undefined.
template <class T>
int64_t group_embedding_bag(const PooledTable<T>* tables, const FeatureBags<T>* features,
                            int64_t num_features, EntryNumbers index, void* workspace,
                            const ParallelFor& parallel_for);

// Returns the bytes of workspace, aligned to 64, for group_embedding_bag_backward, with a taker or
// without. Pass the same `order` [tables] to both.
template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>* tables,
                                                     int64_t num_tables, int32_t* order,
                                                     const ParallelFor& parallel_for,
                                                     bool has_taker = false);

// Computes the gradients of the rows of all tables, each like embedding_bag_backward of the table's
// entries, then divides by `divisor`. index[e] is the number of entry e's row in its table; entries
// with a negative one are skipped. Returns -1, or the first entry whose number is >= num_rows.
//
// With a taker, gradients go to it, in the order of `rows`, and grad and sorted_rows are not used;
// a bad entry is then found before the taker is called.
template <class T>
int64_t group_embedding_bag_backward(const SummedTable<T>* tables, int64_t num_tables,
                                     EntryNumbers index, int64_t divisor, int32_t* order,
                                     void* workspace, const ParallelFor& parallel_for,
                                     const GradientTaker<T>* taker = nullptr);

}  // namespace cpu

// Like the CPU versions. Bad bags are clamped to `entries`; an entry whose row does not exist
// counts as one without a row and is reported in *bad_index or *bad_row. counts [tables] is the
// number of valid elements of `rows` [entries] that each table has from its first entry on;
// PooledTable::rows and num_listed are not read, nor is SummedTable::first_entry. A feature has at
// most max_nnz entries per bag.
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

// Terms of the gradients of all tables. Features are ordered by table, and so are their bags,
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

// Computes the gradients of all tables. The order of additions is always fixed.
template <class T>
void group_embedding_bag_backward(const GroupSums<T>& sums, int64_t* bad_index, void* workspace,
                                  void* stream);

template <class T>
int64_t group_embedding_bag_backward_at_workspace_bytes(const GroupSums<T>& sums);

// Writes the same sums, for the rows sums.rows, into `room`. grad of sums.tables is not read, and
// num_rows is an upper bound; a table has at most as many rows as entries, whatever counts say.
// Sums for rows that do not fit in `room` are dropped; the position of such a row among the rows of
// all tables is reported in *bad_row. The host does not wait for the number of rows.
template <class T>
void group_embedding_bag_backward_at(const GroupSums<T>& sums, const SumRoom<T>& room,
                                     int64_t* bad_index, int64_t* bad_row, void* workspace,
                                     void* stream);

template <class T>
int64_t group_embedding_bag_update_workspace_bytes(const GroupSums<T>& sums);

// Makes an optimizer's step with the gradients that group_embedding_bag_backward would write, as
// update_rows would, but keeps gradients out of memory: only sums of rows whose entries are far
// apart are stored. The host does not wait for the number of rows. grad of sums.tables is not read,
// and num_rows is an upper bound; a table has at most as many rows as entries, whatever counts say.
// Positions in *bad_row count the distinct rows of a table. before_changes() is called after the
// launches that check `index` and before anything is changed; it may throw.
template <class Rule, class T>
void group_embedding_bag_update(const GroupSums<T>& sums, const SteppedTable<T>* tables,
                                const Rule& rule, StepNumber number, Rounding rounding,
                                int64_t* bad_index, int64_t* bad_row,
                                const std::function<void()>& before_changes, void* workspace,
                                void* stream);

}  // namespace cuda
}  // namespace sparsekit
