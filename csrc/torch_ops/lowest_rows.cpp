#include "sparsekit/lowest_rows.h"

#include "hash_table.h"

namespace sparsekit::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor> lowest(Tensor scores, Tensor buckets, int64_t size, int64_t kind,
                                          int64_t halve_every, int64_t now, Tensor pinned,
                                          int64_t count) {
  Arguments given("lowest_rows");
  given.read("scores", scores, ScalarType::Long, 1);
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.read("pinned", pinned, ScalarType::Long, 1);
  check_size_value(given, "size", size, num_buckets);
  given.check(size <= scores.size(0) && size <= kMostNumbered, "size is ", size,
              ", but must be at most ", std::min(scores.size(0), kMostNumbered),
              ", the number of scores or 2^31 - 1");
  given.check(kind == static_cast<int64_t>(ScorePolicy::kLru) ||
                  kind == static_cast<int64_t>(ScorePolicy::kLfu),
              "kind must be 1 (lru) or 2 (lfu), got ", kind);
  given.check(halve_every >= 0, "halve_every must be >= 0, got ", halve_every);
  given.check(count >= 0, "count must be >= 0, got ", count);
  scores = packed(scores);
  pinned = packed(pinned);
  const DeviceContext context(scores);
  const int64_t most = std::min(count, size);
  Tensor rows = new_output(scores, {most});
  Tensor orders = new_output(scores, {most});
  Tensor keys = new_output(scores, {most});
  const ScoredRows table{int64_data(scores),
                         size,
                         static_cast<ScorePolicy>(kind),
                         halve_every,
                         now,
                         data<Bucket>(buckets),
                         num_buckets,
                         int64_data(pinned),
                         pinned.numel(),
                         most};
  const LowestRows found{mutable_data<int64_t>(rows), mutable_data<int64_t>(orders),
                         mutable_data<int64_t>(keys)};
  int64_t n = 0;
  if constexpr (kOnDevice) {
    const Workspace memory(cuda::lowest_rows_workspace_bytes(size), scores);
    Tensor num_found = new_output(scores, {1});
    cuda::lowest_rows(table, found, mutable_data<int64_t>(num_found), memory.data(),
                      context.stream());
    context.read(int64_data(num_found), 1, &n);
  } else {
    const Workspace memory(cpu::lowest_rows_workspace_bytes(size), scores);
    n = cpu::lowest_rows(table, found, memory.data(), torch_parallel_for());
  }
  if (n < most) {
    for (Tensor* tensor : {&rows, &orders, &keys}) {
      *tensor = torch::stable::narrow(*tensor, 0, 0, n);
    }
  }
  return {rows, orders, keys};
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("lowest_rows", TORCH_BOX(&sparsekit::ops::lowest));
}
