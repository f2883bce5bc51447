#include "cuda/plain_bags.cuh"
#include "cuda/primitives.h"
#include "sparsekit/gather_rows.h"
#include "sparsekit/group_embedding_bag.h"

namespace sparsekit::cuda {
namespace {

// Vectors that are neighbours to where those of a feature's bags are, or back.
template <class T>
SPARSEKIT_KERNEL pack_kernel(const T* in, int64_t stride, int64_t num_bags, int64_t dim,
                             T* vectors) {
  for (int64_t i = simt::global_thread(); i < num_bags * dim; i += simt::global_threads()) {
    vectors[i] = in == nullptr ? T{} : in[i / dim * stride + i % dim];
  }
}
template <class T>
SPARSEKIT_KERNEL divide_kernel(T* values, int64_t n, Acc<T> by) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::global_threads()) {
    values[i] = store<T>(load(values[i]) / by);
  }
}

// ---- gradients ----

template <class T>
struct SumWorkspace {
  PlainBags<Acc<T>> plain;
  T* grads;
  // To sort the rows:
  uint32_t *row = nullptr, *sorted_row = nullptr;
  int32_t *number = nullptr, *sorted_number = nullptr;
  T* sums = nullptr;
  int64_t* order = nullptr;
  char* sort = nullptr;
  char* summing;
  int64_t bytes;

  SumWorkspace(Arena arena, const SummedTable<T>& table, int64_t entries, bool weighted)
      : plain(take_plain_bags<T>(arena, bags_of(table, entries).most, bags_of(table, 0).num_bags,
                                 weighted)),
        grads(arena.take<T>((plain.num_bags + 1) * table.dim)) {
    if (table.sorted_rows != nullptr) {
      row = arena.take<uint32_t>(table.num_rows);
      sorted_row = arena.take<uint32_t>(table.num_rows);
      number = arena.take<int32_t>(table.num_rows);
      sorted_number = arena.take<int32_t>(table.num_rows);
      sums = arena.take<T>(table.num_rows * table.dim);
      order = arena.take<int64_t>(table.num_rows);
      sort = arena.take<char>(sort_workspace_bytes(table.num_rows));
    }
    summing = arena.take<char>(
        embedding_bag_backward_workspace_bytes<T>(plain.bags(), table.dim, table.num_rows));
    bytes = arena.bytes();
  }

  // Those of all features together, which lie side by side.
  static DeviceBags bags_of(const SummedTable<T>& table, int64_t entries) {
    DeviceBags all{nullptr, 0, entries, 0};
    if (table.num_features > 0) all.bags = table.features[0].bags.narrow;
    for (int64_t f = 0; f < table.num_features; ++f) {
      all.num_bags += table.features[f].num_bags;
      all.most += device_bags(table.features[f], entries).most;
    }
    all.most = std::min(all.most, entries);
    return all;
  }
};

SPARSEKIT_KERNEL rows_to_sort_kernel(const int32_t* rows, DeviceBags table, int64_t n,
                                     uint32_t* row, int32_t* number) {
  const int64_t i = simt::global_thread();
  if (i >= n) return;
  const int64_t at = table.begin() + i;
  row[i] = at < table.entries ? static_cast<uint32_t>(rows[at]) : 0;
  number[i] = static_cast<int32_t>(i);
}
SPARSEKIT_KERNEL sorted_rows_kernel(const uint32_t* row, const int32_t* number, int64_t n,
                                    int64_t* rows, int64_t* order) {
  const int64_t i = simt::global_thread();
  if (i >= n) return;
  rows[i] = row[i];
  order[i] = number[i];
}

// How the features of a table pool: alike, or each in its own way.
template <class T>
struct Ways {
  Combiner combiner = Combiner::kSum;
  bool weighted = false, scale = false;

  explicit Ways(const SummedTable<T>& table) {
    const auto way = [](const FeatureBags<T>& bags) {
      return bags.combiner == Combiner::kNone ? Combiner::kSum : bags.combiner;
    };
    for (int64_t f = 0; f < table.num_features; ++f) {
      const FeatureBags<T>& bags = table.features[f];
      const bool has_weights = bags.sample_weights != nullptr;
      scale |= f > 0 && (way(bags) != combiner || has_weights != weighted);
      combiner = way(bags);
      weighted = has_weights;
    }
    if (!scale) return;
    combiner = Combiner::kSum;
    weighted = true;
  }
};

template <class T>
void sum_table(const SummedTable<T>& table, int64_t entries, const int32_t* index,
               const int32_t* rows, const int64_t* count, int64_t divide_by, bool deterministic,
               const BagErrors& bag_errors, int64_t* bad_index, const SumWorkspace<T>& work,
               void* stream) {
  const Ways<T> ways(table);
  const PlainBags<Acc<T>>& plain = work.plain;
  if (table.num_features == 0) {  // nobody asks for any of its rows
    simt::launch("group: pack", pack_kernel<T>, simt::strided_grid_for(table.num_rows * table.dim),
                 stream, static_cast<const T*>(nullptr), int64_t{0}, table.num_rows, table.dim,
                 table.grad);
    return;
  }
  const DeviceBags all = SumWorkspace<T>::bags_of(table, entries);
  const Numbers numbers{index, nullptr, count, all};
  int64_t first_bag = 0;
  for (int64_t f = 0; f < table.num_features; ++f) {
    const FeatureBags<T>& bags = table.features[f];
    const DeviceBags own = device_bags(bags, entries);
    simt::launch("group: bags", plain_bags_kernel<T>,
                 simt::grid_for(std::max(own.most, own.num_bags)), stream, bags, own, numbers, all,
                 ways.scale, first_bag, plain, bad_index);
    simt::launch("group: pack", pack_kernel<T>, simt::strided_grid_for(own.num_bags * table.dim),
                 stream, bags.grad, bags.stride, own.num_bags, table.dim,
                 work.grads + first_bag * table.dim);
    first_bag += own.num_bags;
  }
  simt::launch("group: rest", rest_of_bags_kernel<Acc<T>>, simt::grid_for(plain.n), stream, all,
               plain);
  simt::launch("group: pack", pack_kernel<T>, simt::strided_grid_for(table.dim), stream,
               static_cast<const T*>(nullptr), int64_t{0}, int64_t{1}, table.dim,
               work.grads + first_bag * table.dim);
  const bool sorts = table.sorted_rows != nullptr;
  T* sums = sorts ? work.sums : table.grad;
  embedding_bag_backward(static_cast<const T*>(work.grads), table.num_rows, table.dim, plain.bags(),
                         static_cast<const Acc<T>*>(plain.weights), ways.combiner, deterministic,
                         sums, bag_errors, work.summing, stream);
  if (sorts && table.num_rows > 0) {
    const simt::Grid grid = simt::grid_for(table.num_rows);
    simt::launch("group: rows to sort", rows_to_sort_kernel, grid, stream, rows, all,
                 table.num_rows, work.row, work.number);
    sort_pairs(work.row, work.sorted_row, work.number, work.sorted_number, table.num_rows, 32,
               work.sort, stream);
    simt::launch("group: sorted rows", sorted_rows_kernel, grid, stream, work.sorted_row,
                 work.sorted_number, table.num_rows, table.sorted_rows, work.order);
    gather_rows(sums, table.num_rows, table.dim * static_cast<int64_t>(sizeof(T)), work.order,
                table.num_rows, table.grad, bag_errors.bad_row, stream);
  }
  if (divide_by != 1) {
    const int64_t elements = table.num_rows * table.dim;
    simt::launch("group: divide", divide_kernel<T>, simt::strided_grid_for(elements), stream,
                 table.grad, elements, static_cast<Acc<T>>(divide_by));
  }
}

}  // namespace

template <class T>
int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>* tables,
                                                     int64_t num_tables, int64_t entries) {
  int64_t most = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    const bool weighted = Ways<T>(tables[t]).weighted;
    most = std::max(most, SumWorkspace<T>(Arena(), tables[t], entries, weighted).bytes);
  }
  return most;
}

template <class T>
void group_embedding_bag_backward(const SummedTable<T>* tables, int64_t num_tables, int64_t entries,
                                  const int32_t* index, const int32_t* rows, const int64_t* counts,
                                  int64_t divisor, bool deterministic, const BagErrors& bag_errors,
                                  int64_t* bad_index, void* workspace, void* stream) {
  for (int64_t t = 0; t < num_tables; ++t) {
    const SummedTable<T>& table = tables[t];
    const SumWorkspace<T> work(Arena(workspace), table, entries, Ways<T>(table).weighted);
    sum_table(table, entries, index, rows, counts + t, divisor, deterministic, bag_errors,
              bad_index, work, stream);
  }
}

#define SPARSEKIT_INSTANTIATE(T)                                                                \
  template int64_t group_embedding_bag_backward_workspace_bytes(const SummedTable<T>*, int64_t, \
                                                                int64_t);                       \
  template void group_embedding_bag_backward(                                                   \
      const SummedTable<T>*, int64_t, int64_t, const int32_t*, const int32_t*, const int64_t*,  \
      int64_t, bool, const BagErrors&, int64_t*, void*, void*);
SPARSEKIT_INSTANTIATE(float)
SPARSEKIT_INSTANTIATE(double)
SPARSEKIT_INSTANTIATE(BFloat16)
#undef SPARSEKIT_INSTANTIATE

}  // namespace sparsekit::cuda
