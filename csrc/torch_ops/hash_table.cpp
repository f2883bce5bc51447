#include "sparsekit/hash_table.h"

#include <limits>

#include "exclusive.h"
#include "hash_table.h"
#include "overlap.h"

namespace sparsekit::ops {
namespace {

void no_rows_beyond(const DeviceCount& count, const Tensor& rows) {
  std::fill(mutable_data<int64_t>(rows) + count.get(), mutable_data<int64_t>(rows) + count.most,
            int64_t{-1});
}

void clear(Tensor buckets) {
  check_buckets(buckets, "hash_table_clear_", "buckets");
  const Exclusive alone(buckets, "hash_table_clear_");
  const DeviceContext context(buckets);
  if constexpr (kOnDevice) {
    cuda::hash_table_clear(mutable_data<Bucket>(buckets), buckets.size(0), context.stream());
  } else {
    cpu::hash_table_clear(mutable_data<Bucket>(buckets), buckets.size(0), torch_parallel_for());
  }
}

Tensor find(Tensor buckets, Tensor hash_seed, Tensor keys, std::optional<Tensor> num_keys) {
  const char* op = "hash_table_find";
  check_buckets(buckets, op, "buckets");
  check_same_device(op, {{"buckets", buckets},
                         {"hash_seed", hash_seed},
                         {"keys", keys},
                         {"num_keys", num_keys.value_or(keys)}});
  check_word(hash_seed, op, "hash_seed");
  check_dim(keys, 1, op, "keys");
  keys = packed(keys);
  const DeviceCount count = device_count(keys.numel(), num_keys, op, "num_keys");
  const DeviceContext context(buckets);
  Tensor rows = new_output(keys, {keys.numel()}, ScalarType::Long);
  dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      cuda::hash_table_find(data<Bucket>(buckets), buckets.size(0), int64_data(hash_seed),
                            data<Key>(keys), count, mutable_data<int64_t>(rows), context.stream());
    } else {
      cpu::hash_table_find(data<Bucket>(buckets), buckets.size(0), *int64_data(hash_seed),
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
  const char* op = "hash_table_find_or_insert_";
  check_buckets(buckets, op, "buckets");
  check_same_device(op, {{"buckets", buckets},
                         {"hash_seed", hash_seed},
                         {"size", size},
                         {"keys", keys},
                         {"num_keys", num_keys.value_or(keys)}});
  check_word(hash_seed, op, "hash_seed");
  check_dim(keys, 1, op, "keys");
  check(capacity > 0 && capacity <= buckets.size(0) * kSlotsPerBucket &&
            capacity <= std::numeric_limits<int32_t>::max(),
        op, ": capacity is ", capacity, ", but must be in [1, ",
        std::min<int64_t>(buckets.size(0) * kSlotsPerBucket, std::numeric_limits<int32_t>::max()),
        "]");
  check_word(size, op, "size");
  check(!kOnDevice || keys.numel() <= std::numeric_limits<int32_t>::max(), op, ": keys has ",
        keys.numel(), " elements; at most 2^31 - 1 are supported");
  Overlaps overlaps(op);
  overlaps.written("buckets", buckets);
  overlaps.written("size", size);
  overlaps.read("hash_seed", hash_seed);
  overlaps.read("keys", keys);
  overlaps.read("num_keys", num_keys);
  overlaps.check();
  keys = packed(keys);
  const DeviceCount count = device_count(keys.numel(), num_keys, op, "num_keys");
  const Exclusive alone(buckets, op);
  const DeviceContext context(buckets);
  Tensor rows = new_output(keys, {keys.numel()}, ScalarType::Long);
  Tensor status = new_output(keys, {2}, ScalarType::Long);
  dispatch_keys(keys, op, [&](auto tag) {
    using Key = typename decltype(tag)::type;
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::hash_table_find_or_insert_workspace_bytes(keys.numel()), keys);
      cuda::hash_table_find_or_insert(mutable_data<Bucket>(buckets), buckets.size(0),
                                      int64_data(hash_seed), mutable_data<int64_t>(size), capacity,
                                      data<Key>(keys), count, mutable_data<int64_t>(rows),
                                      mutable_data<int64_t>(status), memory.data(),
                                      context.stream());
    } else {
      const int64_t size_before = *int64_data(size);
      check_size_value(size_before, buckets.size(0), op);
      const int64_t refused = cpu::hash_table_find_or_insert(
          mutable_data<Bucket>(buckets), buckets.size(0), *int64_data(hash_seed),
          mutable_data<int64_t>(size), capacity, data<Key>(keys), count.get(),
          mutable_data<int64_t>(rows), torch_parallel_for());
      no_rows_beyond(count, rows);
      check(refused >= 0, op, ": the table is damaged: no slot is free for row ", size_before,
            " and on, though its capacity is ", capacity);
      mutable_data<int64_t>(status)[0] = size_before;
      mutable_data<int64_t>(status)[1] = refused;
    }
  });
  return {rows, status};
}

Tensor keys(Tensor buckets, Tensor hash_seed, Tensor size) {
  const char* op = "hash_table_keys";
  check_buckets(buckets, op, "buckets");
  check_same_device(op, {{"buckets", buckets}, {"hash_seed", hash_seed}, {"size", size}});
  check_word(hash_seed, op, "hash_seed");
  check_word(size, op, "size");
  const DeviceContext context(buckets);
  int64_t n = 0;
  context.read(int64_data(size), 1, &n);
  check_size_value(n, buckets.size(0), op);
  Tensor keys = new_output(buckets, {n});
  Tensor rows = new_output(buckets, {n});
  bool sound = false;
  if constexpr (kOnDevice) {
    Tensor unsound = new_output(buckets, {1});
    cuda::hash_table_keys(data<Bucket>(buckets), buckets.size(0), int64_data(hash_seed), n,
                          mutable_data<int64_t>(keys), mutable_data<int64_t>(rows),
                          mutable_data<int64_t>(unsound), context.stream());
    sound = context.value(unsound, 0) == 0;
  } else {
    sound = cpu::hash_table_keys(data<Bucket>(buckets), buckets.size(0), *int64_data(hash_seed), n,
                                 mutable_data<int64_t>(keys), mutable_data<int64_t>(rows),
                                 torch_parallel_for());
  }
  check(sound, op, ": the table is damaged: its ", n, " rows do not have one key each");
  return keys;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("hash_table_clear_", TORCH_BOX(&sparsekit::ops::clear));
  m.impl("hash_table_find", TORCH_BOX(&sparsekit::ops::find));
  m.impl("hash_table_find_or_insert_", TORCH_BOX(&sparsekit::ops::find_or_insert));
  m.impl("hash_table_keys", TORCH_BOX(&sparsekit::ops::keys));
}
