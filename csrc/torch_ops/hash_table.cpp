#include "sparsekit/hash_table.h"

#include "hash_table.h"

namespace sparsekit::ops {
namespace {

void no_rows_beyond(const DeviceCount& count, const Tensor& rows) {
  std::fill(mutable_data<int64_t>(rows) + count.get(), mutable_data<int64_t>(rows) + count.most,
            int64_t{-1});
}

void clear(Tensor buckets) {
  Arguments given("hash_table_clear_");
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  const Exclusive alone(given, buckets);
  const DeviceContext context(buckets);
  if constexpr (kOnDevice) {
    cuda::hash_table_clear(mutable_data<Bucket>(buckets), num_buckets, context.stream());
  } else {
    cpu::hash_table_clear(mutable_data<Bucket>(buckets), num_buckets, torch_parallel_for());
  }
}

Tensor find(Tensor buckets, Tensor hash_seed, Tensor keys, std::optional<Tensor> num_keys) {
  Arguments given("hash_table_find");
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.read_word("hash_seed", hash_seed);
  keys = packed(given.read("keys", keys, kAnyDtype, 1));
  const DeviceCount count = given.count(keys.numel(), "num_keys", num_keys);
  const DeviceContext context(buckets);
  Tensor rows = new_output(keys, {keys.numel()}, ScalarType::Long);
  given.dispatch_keys(keys, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      cuda::hash_table_find(data<Bucket>(buckets), num_buckets, int64_data(hash_seed),
                            data<Key>(keys), count, mutable_data<int64_t>(rows), context.stream());
    } else {
      cpu::hash_table_find(data<Bucket>(buckets), num_buckets, *int64_data(hash_seed),
                           data<Key>(keys), count.get(), mutable_data<int64_t>(rows),
                           torch_parallel_for());
      no_rows_beyond(count, rows);
    }
  });
  return rows;
}

std::tuple<Tensor, Tensor> find_or_insert(Tensor buckets, Tensor hash_seed, Tensor size,
                                          Tensor keys, int64_t capacity,
                                          std::optional<Tensor> num_keys) {
  Arguments given("hash_table_find_or_insert_", Arguments::kWrites);
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.check_one("size", given.written("size", size, ScalarType::Long, 1));
  given.read_word("hash_seed", hash_seed);
  given.read("keys", keys, kAnyDtype, 1);
  const DeviceCount count = given.count(keys.numel(), "num_keys", num_keys);
  const int64_t most = std::min(num_buckets * kSlotsPerBucket, kMostNumbered);
  given.check(capacity > 0 && capacity <= most, "capacity is ", capacity, ", but must be in [1, ",
              most, "]");
  if (kOnDevice) given.check_count("keys", count.most);
  given.check_apart();
  keys = packed(keys);
  const Exclusive alone(given, buckets);
  const DeviceContext context(buckets);
  Tensor rows = new_output(keys, {keys.numel()}, ScalarType::Long);
  Tensor status = new_output(keys, {2}, ScalarType::Long);
  given.dispatch_keys(keys, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::hash_table_find_or_insert_workspace_bytes(keys.numel()), keys);
      cuda::hash_table_find_or_insert(mutable_data<Bucket>(buckets), num_buckets,
                                      int64_data(hash_seed), mutable_data<int64_t>(size), capacity,
                                      data<Key>(keys), count, mutable_data<int64_t>(rows),
                                      mutable_data<int64_t>(status), memory.data(),
                                      context.stream());
    } else {
      const int64_t size_before = *int64_data(size);
      check_size_value(given, "size", size_before, num_buckets);
      const int64_t refused = cpu::hash_table_find_or_insert(
          mutable_data<Bucket>(buckets), num_buckets, *int64_data(hash_seed),
          mutable_data<int64_t>(size), capacity, data<Key>(keys), count.get(),
          mutable_data<int64_t>(rows), torch_parallel_for());
      no_rows_beyond(count, rows);
      given.check(refused >= 0, "the table is damaged: no slot is free for row ", size_before,
                  " and on, though its capacity is ", capacity);
      mutable_data<int64_t>(status)[0] = size_before;
      mutable_data<int64_t>(status)[1] = refused;
    }
  });
  return {rows, status};
}

Tensor keys(Tensor buckets, Tensor hash_seed, Tensor size) {
  Arguments given("hash_table_keys");
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.read_word("hash_seed", hash_seed);
  given.read_word("size", size);
  const DeviceContext context(buckets);
  int64_t n = 0;
  context.read(int64_data(size), 1, &n);
  check_size_value(given, "size", n, num_buckets);
  Tensor keys = new_output(buckets, {n});
  bool sound = false;
  if constexpr (kOnDevice) {
    Tensor unsound = new_output(buckets, {1});
    cuda::hash_table_keys(data<Bucket>(buckets), num_buckets, int64_data(hash_seed), n,
                          mutable_data<int64_t>(keys), mutable_data<int64_t>(unsound),
                          context.stream());
    sound = context.value(unsound, 0) == 0;
  } else {
    Tensor rows = new_output(buckets, {n});
    sound = cpu::hash_table_keys(data<Bucket>(buckets), num_buckets, *int64_data(hash_seed), n,
                                 mutable_data<int64_t>(keys), mutable_data<int64_t>(rows),
                                 torch_parallel_for());
  }
  given.check(sound, "the table is damaged: its ", n, " rows do not have one key each");
  return keys;
}

void copy(Tensor to, Tensor buckets, Tensor hash_seed, int64_t rows) {
  Arguments given("hash_table_copy_", Arguments::kWrites);
  const int64_t num_to = read_buckets(given, "to", to);
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.read_word("hash_seed", hash_seed);
  given.check(rows >= 0 && rows <= num_to * kSlotsPerBucket, "rows is ", rows, ", but `to` has ",
              num_to * kSlotsPerBucket, " slots");
  given.check_apart();
  const Exclusive alone(given, to);
  const DeviceContext context(to);
  bool fits = false;
  if constexpr (kOnDevice) {
    Tensor full = new_output(to, {1});
    cuda::hash_table_copy(data<Bucket>(buckets), num_buckets, int64_data(hash_seed), rows,
                          mutable_data<Bucket>(to), num_to, mutable_data<int64_t>(full),
                          context.stream());
    fits = context.value(full, 0) == 0;
  } else {
    fits = cpu::hash_table_copy(data<Bucket>(buckets), num_buckets, *int64_data(hash_seed), rows,
                                mutable_data<Bucket>(to), num_to);
  }
  given.check(fits, "`to` has no slot for some of the keys");
}

void renumber(Tensor buckets, Tensor hash_seed, Tensor new_rows) {
  Arguments given("hash_table_renumber_", Arguments::kWrites);
  const int64_t num_buckets = read_buckets(given, "buckets", buckets);
  given.read_word("hash_seed", hash_seed);
  given.read("new_rows", new_rows, ScalarType::Int, 1);
  given.check_apart();
  new_rows = packed(new_rows);
  const int64_t n = new_rows.numel();
  const Exclusive alone(given, buckets);
  const DeviceContext context(buckets);
  int64_t bad = -1;
  if constexpr (kOnDevice) {
    cuda::hash_table_renumber(mutable_data<Bucket>(buckets), num_buckets, int64_data(hash_seed),
                              data<int32_t>(new_rows), n, context.error_word(DeviceError::kNewRow),
                              context.stream());
    bad = context.error_position(DeviceError::kNewRow, n);
  } else {
    bad =
        cpu::hash_table_renumber(mutable_data<Bucket>(buckets), num_buckets, *int64_data(hash_seed),
                                 data<int32_t>(new_rows), n, torch_parallel_for());
  }
  given.check(bad < 0, "new_rows[", bad, "] is ", bad < 0 ? 0 : context.value(new_rows, bad),
              ", but must be in [-1, ", n, ")");
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("hash_table_clear_", TORCH_BOX(&sparsekit::ops::clear));
  m.impl("hash_table_find", TORCH_BOX(&sparsekit::ops::find));
  m.impl("hash_table_find_or_insert_", TORCH_BOX(&sparsekit::ops::find_or_insert));
  m.impl("hash_table_keys", TORCH_BOX(&sparsekit::ops::keys));
  m.impl("hash_table_copy_", TORCH_BOX(&sparsekit::ops::copy));
  m.impl("hash_table_renumber_", TORCH_BOX(&sparsekit::ops::renumber));
}
