#include "sparsekit/init_rows.h"

#include "overlap.h"

namespace sparsekit::ops {
namespace {

void init_rows(Tensor out, Tensor keys, std::optional<Tensor> rows, std::optional<Tensor> status,
               int64_t seed, int64_t distribution, double a, double b) {
  const char* op = "init_rows_";
  check_same_device(op, {{"out", out},
                         {"keys", keys},
                         {"rows", rows.value_or(keys)},
                         {"status", status.value_or(keys)}});
  check_dim(out, 2, op, "out");
  check_mutable(out, op, "out");
  check_dim(keys, 1, op, "keys");
  check_dtype(keys, ScalarType::Long, op, "keys");
  check(distribution >= 0 && distribution <= static_cast<int64_t>(Distribution::kNormal), op,
        ": distribution must be 0 (constant), 1 (uniform) or 2 (normal), got ", distribution);
  Overlaps overlaps(op);
  overlaps.written("out", out);
  overlaps.read("keys", keys);
  overlaps.read("rows", rows);
  overlaps.read("status", status);
  overlaps.check();
  keys = packed(keys);
  const int64_t n = keys.numel();
  if (rows.has_value()) {
    check_dim(*rows, 1, op, "rows");
    check_dtype(*rows, ScalarType::Long, op, "rows");
    check_size(*rows, 0, n, op, "rows");
    rows = packed(*rows);
  } else {
    check_size(out, 0, n, op, "out");
  }
  if (status.has_value()) {
    check_dtype(*status, ScalarType::Long, op, "status");
    check(status->numel() > 0, op, ": status must not be empty");
  }
  const int64_t* first_row = status ? int64_data(*status) : nullptr;
  check_row_size(out.size(1), op, "out");
  const DeviceContext context(out);
  const Initializer initializer{static_cast<uint64_t>(seed),
                                static_cast<Distribution>(distribution), static_cast<float>(a),
                                static_cast<float>(b)};
  dispatch_rows(out, op, "out", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
    int64_t bad = -1;
    if constexpr (kOnDevice) {
      cuda::init_rows(mutable_data<T>(out), out.size(0), out.size(1), int64_data(keys), row_numbers,
                      n, first_row, initializer, nullptr, context.error_word(DeviceError::kInitRow),
                      context.stream());
      bad = context.error_position(DeviceError::kInitRow, rows ? n : 0);
    } else {
      bad = cpu::init_rows(mutable_data<T>(out), out.size(0), out.size(1), int64_data(keys),
                           row_numbers, n, first_row ? std::max<int64_t>(0, *first_row) : 0,
                           initializer, torch_parallel_for());
    }
    if (bad >= 0) {
      index_error(op, ": rows[", bad, "] is ", context.value(*rows, bad), ", but out has ",
                  out.size(0), " rows");
    }
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("init_rows_", TORCH_BOX(&sparsekit::ops::init_rows));
}
