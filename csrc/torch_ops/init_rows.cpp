#include "sparsekit/init_rows.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

void init_rows(Tensor out, Tensor keys, std::optional<Tensor> rows, std::optional<Tensor> status,
               int64_t seed, int64_t distribution, double a, double b) {
  Arguments given("init_rows_", Arguments::kWrites);
  given.written_rows("out", out, kAnyDtype, 2);
  const int64_t stride = given.row_stride("out", out);
  given.read("keys", keys, ScalarType::Long, 1);
  given.read("rows", rows, ScalarType::Long, 1);
  given.read("status", status, ScalarType::Long);
  given.check(distribution >= 0 && distribution <= static_cast<int64_t>(Distribution::kNormal),
              "distribution must be 0 (constant), 1 (uniform) or 2 (normal), got ", distribution);
  given.check_apart();
  keys = packed(keys);
  const int64_t n = keys.numel();
  if (rows.has_value()) {
    given.check_size("rows", *rows, 0, n);
    rows = packed(*rows);
  } else {
    given.check_size("out", out, 0, n);
  }
  given.check(!status.has_value() || status->numel() > 0, "status must not be empty");
  const int64_t* first_row = status ? int64_data(*status) : nullptr;
  given.check_row_size("out", out.size(1));
  const DeviceContext context(out);
  const Initializer initializer{static_cast<uint64_t>(seed),
                                static_cast<Distribution>(distribution), static_cast<float>(a),
                                static_cast<float>(b)};
  given.dispatch_rows("out", out, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
    int64_t bad = -1;
    if constexpr (kOnDevice) {
      cuda::init_rows(mutable_data<T>(out), out.size(0), out.size(1), stride, int64_data(keys),
                      row_numbers, n, first_row, initializer, nullptr,
                      context.error_word(DeviceError::kInitRow), context.stream());
      bad = context.error_position(DeviceError::kInitRow, rows ? n : 0);
    } else {
      bad = cpu::init_rows(mutable_data<T>(out), out.size(0), out.size(1), stride, int64_data(keys),
                           row_numbers, n, first_row ? std::max<int64_t>(0, *first_row) : 0,
                           initializer, torch_parallel_for());
    }
    if (bad >= 0) given.row_error(bad, context.value(*rows, bad), "out", out.size(0));
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("init_rows_", TORCH_BOX(&sparsekit::ops::init_rows));
}
