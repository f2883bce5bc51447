// Pools rows of many tables in one call, and computes the gradients of pooling.
#pragma once

#include <cstdint>
#include <functional>

#include "sparsekit/device_count.h"
#include "sparsekit/device_memory.h"
#include "sparsekit/embedding_bag.h"
#include "sparsekit/init_rows.h"
#include "sparsekit/parallel.h"
#include "sparsekit/update_rows.h"

namespace sparsekit {

// A table, with the fields that pooling reads.
template <class T>
struct PooledTable {
  const T* weight;
  int64_t num_rows, dim;
  int64_t stride;  // row r begins at weight + r * stride; rows may overlap
  // [num_listed], or null. If given, `index` holds positions in this list instead of rows.
  const int32_t* rows;
  int64_t num_listed;
  // Seed of the initial vectors that replace negative rows. If null, zeros replace negative rows.
  const int64_t* seed;
  Initializer initializer;  // initializer.seed is not used
};

// The bags of a feature. The vector of bag b begins at out + b * stride, and its gradient at grad +
// b * stride.
template <class T>
struct FeatureBags {
  int64_t table, num_bags;
  EntryNumbers bags;  // [num_bags + 1] first entry of each bag, then the end of the last bag
  Combiner combiner;
  T* out;
  const T* grad;
  int64_t stride;
  // Weights of all keys of the source, or null; the feature's weights begin at *key_start.
  const Acc<T>* sample_weights;
  const void* keys;
  bool wide_keys;
  int64_t num_keys;
  const int64_t* key_start;  // null means 0
  int64_t max_nnz;           // used only on a device

  int64_t first_entry() const { return bags[0]; }
  int64_t num_entries() const { return bags[num_bags] - bags[0]; }
  // Returns true if all vectors are aligned to `width` elements, provided that the first one is.
  bool keeps_alignment(int64_t width) const { return num_bags <= 1 || stride % width == 0; }
  SPARSEKIT_HOST_DEVICE int64_t first() const { return key_start == nullptr ? 0 : *key_start; }
  SPARSEKIT_HOST_DEVICE int64_t key(int64_t i) const {
    return wide_keys ? static_cast<const int64_t*>(keys)[i] : static_cast<const int32_t*>(keys)[i];
  }
};

// Each table's gradient begins at a multiple of this many elements, so that vector loads can read
// it.
constexpr int64_t kPartElements = 16;

// Arguments for computing the gradient of one table.
template <class T>
struct SummedTable {
  const FeatureBags<T>* features;
  int64_t num_features;
  int64_t first_entry, n;
  int64_t num_rows, dim;  // shape of the gradient
  T* grad;                // [num_rows, dim]
  // [num_rows], or null. If given, gradients are written in ascending order of row, and the sorted
  // rows are written to sorted_rows [num_rows].
  const int32_t* rows;
  int64_t* sorted_rows;
};

// Callback that consumes the gradient of a table while it is in the cache, on the thread that
// summed it: grad [num_rows, dim] is the gradient of `rows` [num_rows]. Both arrays are valid only
// during the call. Calls for different tables may run concurrently; `parallel_for` uses only the
// threads that the call may use. Must not throw.
template <class T>
using GradientTaker = std::function<void(int64_t table, const int64_t* rows, const T* grad,
                                         const ParallelFor& parallel_for)>;

// Output buffer for the sums of all tables. In `out`, the sum for row r of table t begins at
// element r * row_strides[t].
template <class T>
struct SumRoom {
  T* out;
  int64_t elements;            // size of `out` in elements
  const int64_t* row_strides;  // [tables]

  // Returns the number of rows of table t that fit in `out` if they have `dim` elements each.
  int64_t num_rows(int64_t t, int64_t dim) const {
    return elements < dim ? 0 : (elements - dim) / row_strides[t] + 1;
  }
};

namespace cpu {

// Returns the size in bytes of the workspace for group_embedding_bag. The workspace must be 64-byte
// aligned. Without initial vectors, the size is 8 * (num_features + 1).
template <class T>
int64_t group_embedding_bag_workspace_bytes(const PooledTable<T>* tables,
                                            const FeatureBags<T>* features, int64_t num_features,
                                            const ParallelFor& parallel_for);

// Pools the bags of all features. index[e] is the row of entry e or, if its table has a list
// `rows`, a position in the list. `bags` and `index` must have the same integer type. Returns -1,
// or an entry with a row or position out of range; the output is then undefined.
template <class T>
int64_t group_embedding_bag(const PooledTable<T>* tables, const FeatureBags<T>* features,
                            int64_t num_features, EntryNumbers index, void* workspace,
                            const ParallelFor& parallel_for);

// Returns the size in bytes of the workspace for group_embedding_bag_backward, with or without a
// taker. The workspace must be 64-byte aligned. Pass the same buffer `order` [tables] to both
// functions.
template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>* tables,
                                                     int64_t num_tables, int32_t* order,
                                                     const ParallelFor& parallel_for,
                                                     bool has_taker = false);

// Computes each table's gradient, as embedding_bag_backward would from the table's entries, and
// divides it by `divisor`. index[e] is the index of entry e's row among the num_rows rows of its
// table's gradient; entries with a negative index are skipped. Returns -1, or the first entry with
// an index >= num_rows.
//
// If there is a taker, gradients are passed to the taker, in the order of `rows`; grad and
// sorted_rows are not used. In this case, bad entries are found before the taker is first called.
template <class T>
int64_t group_embedding_bag_backward(const SummedTable<T>* tables, int64_t num_tables,
                                     EntryNumbers index, int64_t divisor, int32_t* order,
                                     void* workspace, const ParallelFor& parallel_for,
                                     const GradientTaker<T>* taker = nullptr);

}  // namespace cpu

// Like the CPU versions, with these differences. Bad bags are clamped to `entries`. An entry whose
// row is out of range is treated as having no row, and is reported in *bad_index or *bad_row.
// `rows` [entries] has a range for each table, which begins at the table's first entry; counts
// [tables] is the number of valid elements in each range. PooledTable::rows,
// PooledTable::num_listed and SummedTable::first_entry are not read. No bag may have more entries
// than its feature's max_nnz.
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
                         const KeepOnDevice& keep, void* workspace, void* stream);

// Arguments for computing the gradients of all tables. Features, bags, gradients and sorted rows
// are all ordered by table.
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

// Computes the gradients of all tables. The order of additions is fixed.
template <class T>
void group_embedding_bag_backward(const GroupSums<T>& sums, int64_t* bad_index, void* workspace,
                                  void* stream);

template <class T>
int64_t group_embedding_bag_backward_at_workspace_bytes(const GroupSums<T>& sums);

// Like group_embedding_bag_backward, but writes the sums for sums.rows to `room`. Does not read the
// field `grad` of sums.tables. Each table's num_rows is only an upper bound. A table has at most as
// many rows as entries, even if `counts` is larger. Sums that do not fit in `room` are dropped;
// *bad_row then becomes the position of one such row among the rows of all tables. The host does
// not wait for the number of rows.
template <class T>
void group_embedding_bag_backward_at(const GroupSums<T>& sums, const SumRoom<T>& room,
                                     int64_t* bad_index, int64_t* bad_row, void* workspace,
                                     void* stream);

template <class T>
int64_t group_embedding_bag_update_workspace_bytes(const GroupSums<T>& sums);

// Makes the optimizer step that update_rows would make with the gradients from
// group_embedding_bag_backward, but does not write these gradients to memory: only the sums of rows
// whose sorted entries span several chunks are stored. Does not read the field `grad` of
// sums.tables. Each table's num_rows is only an upper bound. A table has at most as many rows as
// entries, even if `counts` is larger. Positions in *bad_row are counted among the distinct rows of
// a table. before_changes() is called after the launches that check `index` and before anything is
// changed; it may throw. The host does not wait for the number of rows.
template <class Rule, class T>
void group_embedding_bag_update(const GroupSums<T>& sums, const SteppedTable<T>* tables,
                                const Rule& rule, StepNumber number, Rounding rounding,
                                int64_t* bad_index, int64_t* bad_row,
                                const std::function<void()>& before_changes,
                                const KeepOnDevice& keep, void* workspace, void* stream);

}  // namespace cuda
}  // namespace sparsekit
