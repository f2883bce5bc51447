#include "sparsekit/group_drop_lowest.h"

#include "group.h"
#include "hash_table.h"
#include "moved_tensor.h"

namespace sparsekit::ops {
namespace {

struct DropRow {
  static constexpr ScalarType kDtype = ScalarType::Long;
  int64_t policy, halve_every, now, count, tensors, lists, pinned;
};
static_assert(sizeof(DropRow) == 7 * sizeof(int64_t));

// Divides the items of the list with this name among the tables: table t gets the items at
// positions [result[t], result[t + 1]).
std::vector<size_t> parts_of(const Arguments& given, const char* list, size_t length,
                             const Descriptor<DropRow>& rows, int64_t DropRow::* count) {
  std::vector<size_t> ends{0};
  for (size_t t = 0; t < rows.size(); ++t) {
    const int64_t own = rows[t].*count;
    given.check(own >= 0 && own <= static_cast<int64_t>(length - ends.back()), "tables[", t,
                "] has ", own, " of ", list, ", of which ", length - ends.back(), " are left");
    ends.push_back(ends.back() + static_cast<size_t>(own));
  }
  given.check_list(list, length, ends.back());
  return ends;
}

// The tables of a call, with checked arguments, and the memory that they point to.
struct Dropping {
  std::vector<DroppingTable> tables;
  std::vector<MovedTensor> tensors;
  std::vector<RowList> lists;

  Dropping(Arguments& given, const Tensors& buckets, const Tensors& hash_seeds,
           const Tensors& sizes, const Tensors& tensors_in, const Tensors& initial,
           const Tensors& lists_in, const Descriptor<DropRow>& rows, int64_t* lost) {
    const size_t count = rows.size();
    given.check_list("buckets", buckets.size(), count);
    given.check_list("hash_seeds", hash_seeds.size(), count);
    given.check_list("sizes", sizes.size(), count);
    given.check_list("initial", initial.size(), tensors_in.size());
    const auto of_tensors = parts_of(given, "tensors", tensors_in.size(), rows, &DropRow::tensors);
    const auto of_lists = parts_of(given, "lists", lists_in.size(), rows, &DropRow::lists);
    tensors.reserve(tensors_in.size());
    for (size_t k = 0; k < lists_in.size(); ++k) {
      given.written({"lists", k}, lists_in[k], ScalarType::Int, 1);
      lists.push_back({mutable_data<int32_t>(lists_in[k]), lists_in[k].numel(), lost + k});
    }
    for (size_t t = 0; t < count; ++t) {
      const DropRow& row = rows[t];
      const int64_t num_buckets = read_buckets(given, {"buckets", t}, buckets[t]);
      given.read_word({"hash_seeds", t}, hash_seeds[t]);
      given.check_one({"sizes", t}, given.written({"sizes", t}, sizes[t], ScalarType::Long, 1));
      given.check(row.policy == static_cast<int64_t>(ScorePolicy::kLru) ||
                      row.policy == static_cast<int64_t>(ScorePolicy::kLfu),
                  "tables[", t, "] must begin with 1 (lru) or 2 (lfu), got ", row.policy);
      given.check(row.halve_every >= 0, "halve_every of tables[", t, "] must be >= 0, got ",
                  row.halve_every);
      given.check(row.count >= 0, "count of tables[", t, "] must be >= 0, got ", row.count);
      given.check(row.tensors >= 1, "tables[", t, "] has no tensors; the first must be its scores");
      given.check(row.pinned >= 0 && row.pinned <= row.lists, "tables[", t, "] has ", row.pinned,
                  " pinned lists of ", row.lists);
      int64_t size = 0;
      if constexpr (!kOnDevice) {
        size = *int64_data(sizes[t]);
        check_size_value(given, {"sizes", t}, size, num_buckets);
        given.check(size <= kMostNumbered, "sizes[", t, "] is ", size, ", more than 2^31 - 1");
      }
      const size_t first = of_tensors[t];
      given.check_dtype({"tensors", first}, tensors_in[first], ScalarType::Long);
      given.check(tensors_in[first].dim() == 1, "tensors[", first,
                  "], the scores of a table, must have 1 dimension");
      for (size_t i = first; i < of_tensors[t + 1]; ++i) {
        tensors.push_back(moved_tensor(given, i, tensors_in[i], initial[i], size, "row in use"));
      }
      given.check(tensors[first].stride_bytes == sizeof(int64_t) || size <= 1, "tensors[", first,
                  "], the scores of a table, must be contiguous");
      DroppingTable table{};
      table.buckets = mutable_data<Bucket>(buckets[t]);
      table.num_buckets = num_buckets;
      if constexpr (!kOnDevice) table.hash_seed = *int64_data(hash_seeds[t]);
      table.policy = static_cast<ScorePolicy>(row.policy);
      table.halve_every = row.halve_every;
      table.now = row.now;
      table.size = mutable_data<int64_t>(sizes[t]);
      table.count = row.count;
      table.tensors = tensors.data() + first;
      table.num_tensors = row.tensors;
      table.lists = lists.data() + of_lists[t];
      table.num_lists = row.lists;
      table.num_pinned = row.pinned;
      tables.push_back(table);
    }
    given.check_apart();
  }
};

std::tuple<Tensor, Tensor> drop(const Tensors& buckets, const Tensors& hash_seeds,
                                const Tensors& sizes, const Tensors& tensors,
                                const Tensors& initial, const Tensors& lists,
                                const Tensor& tables) {
  Arguments given("group_drop_lowest_", Arguments::kWrites);
  given.expect(4 * buckets.size() + tensors.size() + lists.size());
  const Descriptor<DropRow> rows(given, "tables", tables);
  const auto count = static_cast<int64_t>(rows.size());
  const Tensor dropped = new_output(tables, {count});
  const Tensor lost = new_output(tables, {static_cast<int64_t>(lists.size())});
  std::fill_n(mutable_data<int64_t>(dropped), count, int64_t{-1});
  std::fill_n(mutable_data<int64_t>(lost), lists.size(), int64_t{0});
  const Exclusive alone(given, Views(buckets));  // before sizes are read and checked
  Dropping dropping(given, buckets, hash_seeds, sizes, tensors, initial, lists, rows,
                    mutable_data<int64_t>(lost));
  if constexpr (!kOnDevice) {
    std::vector<int32_t> order(rows.size());
    const ParallelFor parallel_for = torch_parallel_for();
    const Workspace memory(cpu::group_drop_lowest_workspace_bytes(dropping.tables.data(), count,
                                                                  order.data(), parallel_for),
                           tables);
    cpu::group_drop_lowest(dropping.tables.data(), count, mutable_data<int64_t>(dropped),
                           order.data(), memory.data(), parallel_for);
  }
  return {dropped, lost};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("group_drop_lowest_", TORCH_BOX(&sparsekit::ops::drop));
}
