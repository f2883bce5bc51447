#include "sparsekit/lazy_adam.h"

#include "engine.h"

namespace sparsekit::ops {
namespace {

void lazy_adam_step(Tensor weight, Tensor exp_avg, Tensor exp_avg_sq, std::optional<Tensor> rows,
                    Tensor grad, Tensor step, double lr, double beta1, double beta2, double eps) {
  const char* op = "lazy_adam_step_";
  check_same_device(op, {{"weight", weight},
                         {"exp_avg", exp_avg},
                         {"exp_avg_sq", exp_avg_sq},
                         {"rows", rows.value_or(grad)},
                         {"grad", grad},
                         {"step", step}});
  check_dim(weight, 2, op, "weight");
  check_mutable(weight, op, "weight");
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  for (const auto& [state, name] : {std::pair{&exp_avg, "exp_avg"}, {&exp_avg_sq, "exp_avg_sq"}}) {
    check_dim(*state, 2, op, name);
    check_size(*state, 0, num_rows, op, name);
    check_size(*state, 1, dim, op, name);
    check_mutable(*state, op, name);
  }
  check_dim(grad, 2, op, "grad");
  check_size(grad, 1, dim, op, "grad");
  check_dtype(grad, weight.scalar_type(), op, "grad");
  if (rows.has_value()) {
    check_dim(*rows, 1, op, "rows");
    check_dtype(*rows, ScalarType::Long, op, "rows");
    check_size(*rows, 0, grad.size(0), op, "rows");
    rows = torch::stable::contiguous(*rows);
  } else {
    check_size(grad, 0, num_rows, op, "grad");
  }
  check_dtype(step, ScalarType::Long, op, "step");
  check(step.numel() == 1 && (kOnDevice || *int64_data(step) >= 1), op,
        ": step must be one number >= 1");
  grad = torch::stable::contiguous(grad);
  check_row_size(dim, op, "weight");
  const Engine engine(weight);
  const LazyAdam adam{lr, beta1, beta2, eps};
  dispatch_rows(weight, op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    check_dtype(exp_avg, kAccumulateType<T>, op, "exp_avg");
    check_dtype(exp_avg_sq, kAccumulateType<T>, op, "exp_avg_sq");
    const int64_t* row_numbers = rows ? int64_data(*rows) : nullptr;
    int64_t bad = -1;
    if constexpr (kOnDevice) {
      cuda::lazy_adam_step(mutable_data<T>(weight), mutable_data<Acc<T>>(exp_avg),
                           mutable_data<Acc<T>>(exp_avg_sq), num_rows, dim, row_numbers,
                           data<T>(grad), DeviceCount{grad.size(0)}, adam, int64_data(step),
                           engine.bad(Complaint::kAdamRow), engine.stream());
      bad = engine.found(Complaint::kAdamRow, rows ? grad.size(0) : 0);
    } else {
      bad = cpu::lazy_adam_step(mutable_data<T>(weight), mutable_data<Acc<T>>(exp_avg),
                                mutable_data<Acc<T>>(exp_avg_sq), num_rows, dim, row_numbers,
                                data<T>(grad), grad.size(0), adam, *int64_data(step),
                                torch_parallel_for());
    }
    if (bad >= 0) {
      index_error(op, ": rows[", bad, "] is ", engine.value(*rows, bad), ", but weight has ",
                  num_rows, " rows");
    }
  });
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("lazy_adam_step_", TORCH_BOX(&sparsekit::ops::lazy_adam_step));
}
