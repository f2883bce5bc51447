#include "sparsekit/embedding_bag.h"

#include "arguments.h"

namespace sparsekit::ops {
namespace {

// Checked arguments shared by forward and backward. Owns the memory of `bags`.
struct BagArguments {
  const Arguments& given;
  Tensor rows;
  Tensor offsets;
  std::optional<Tensor> sample_weights;
  Combiner combiner;
  Bags bags;

  BagArguments(Arguments& given, const Tensor& rows_in, const Tensor& offsets_in,
               int64_t combiner_code, const std::optional<Tensor>& sample_weights_in)
      : given(given),
        rows(given.read("rows", rows_in, kAnyDtype, 1)),
        offsets(given.read("offsets", offsets_in, kAnyDtype, 1)),
        combiner(static_cast<Combiner>(combiner_code)) {
    given.check(offsets.numel() > 0, "offsets must have one element more than there are bags");
    given.check(combiner_code >= 0 && combiner_code <= static_cast<int64_t>(Combiner::kSqrtn),
                "combiner must be 0 (sum), 1 (mean) or 2 (sqrtn), got ", combiner_code);
    given.check(!kOnDevice || (rows.numel() <= kMostNumbered && offsets.numel() <= kMostNumbered),
                rows.numel(), " rows in ", offsets.numel() - 1,
                " bags; at most 2^31 - 1 rows and as many offsets are supported");
    rows = given.packed_int64("rows", rows);
    offsets = given.packed_int64("offsets", offsets);
    if (sample_weights_in.has_value()) {
      given.read("sample_weights", *sample_weights_in, kAnyDtype, 1);
      given.check_size("sample_weights", *sample_weights_in, 0, rows.numel());
      sample_weights = packed(*sample_weights_in);
    }
    bags = Bags{int64_data(rows), rows.numel(), int64_data(offsets), offsets.numel() - 1};
    if constexpr (!kOnDevice) {
      check_offset(cpu::check_offsets(bags, torch_parallel_for()), DeviceContext(rows));
    }
  }

  // Checks the total size that the rows would have if every entry had its own row.
  void check_dim_of_rows(int64_t dim) const { given.check_elements("rows to pool", {bags.n, dim}); }

  template <class T>
  const Acc<T>* sample_weights_data() const {
    if (!sample_weights.has_value()) return nullptr;
    given.check_dtype("sample_weights", *sample_weights, kAccumulateType<T>);
    return data<Acc<T>>(*sample_weights);
  }

  void check_offset(int64_t bad, const DeviceContext& context) const {
    if (bad < 0) return;
    given.error("offsets must rise from 0 to len(rows) = ", bags.n, ", but offsets[", bad, "] is ",
                context.value(offsets, bad));
  }

  void check_row(int64_t bad, int64_t num_rows, const DeviceContext& context) const {
    if (bad >= 0) given.row_error(bad, context.value(rows, bad), "weight", num_rows);
  }

  // With checks on, throws the errors found by the device. Reads both error words before throwing,
  // so that no error is left for a later call.
  void check_found(int64_t num_rows, const DeviceContext& context) const {
    const int64_t bad_offset = context.error_position(DeviceError::kBagOffset, offsets.numel());
    const int64_t bad_row = context.error_position(DeviceError::kBagRow, rows.numel());
    check_offset(bad_offset, context);
    check_row(bad_row, num_rows, context);
  }
};

cuda::BagErrors errors_of(const DeviceContext& context) {
  return {context.error_word(DeviceError::kBagOffset), context.error_word(DeviceError::kBagRow)};
}

Tensor embedding_bag(Tensor weight, Tensor rows, Tensor offsets, int64_t combiner,
                     std::optional<Tensor> sample_weights) {
  Arguments given("embedding_bag");
  given.read("weight", weight, kAnyDtype, 2);
  const BagArguments arguments(given, rows, offsets, combiner, sample_weights);
  weight = packed(weight);
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  given.check_row_size("weight", dim);
  arguments.check_dim_of_rows(dim);
  given.check_elements("a result", {arguments.bags.num_bags, dim});
  const DeviceContext context(weight);
  Tensor out = new_output(weight, {arguments.bags.num_bags, dim});
  given.dispatch_rows("weight", weight, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>();
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::embedding_bag_workspace_bytes<T>(arguments.bags, dim), weight);
      cuda::embedding_bag(data<T>(weight), num_rows, dim, arguments.bags, weights,
                          arguments.combiner, mutable_data<T>(out), errors_of(context),
                          memory.data(), context.stream());
      arguments.check_found(num_rows, context);
    } else {
      const int64_t bad =
          cpu::embedding_bag(data<T>(weight), num_rows, dim, arguments.bags, weights,
                             arguments.combiner, mutable_data<T>(out), torch_parallel_for());
      arguments.check_row(bad, num_rows, context);
    }
  });
  return out;
}

Tensor embedding_bag_backward(Tensor grad, Tensor rows, Tensor offsets, int64_t combiner,
                              std::optional<Tensor> sample_weights, int64_t num_rows,
                              bool deterministic) {
  Arguments given("embedding_bag_backward");
  given.read("grad", grad, kAnyDtype, 2);
  const BagArguments arguments(given, rows, offsets, combiner, sample_weights);
  given.check_size("grad", grad, 0, arguments.bags.num_bags);
  given.check_sort_sizes(arguments.bags.n, "num_rows", num_rows);
  grad = packed(grad);
  const int64_t dim = grad.size(1);
  given.check_row_size("grad", dim);
  arguments.check_dim_of_rows(dim);
  given.check_elements("a result", {num_rows, dim});
  const DeviceContext context(grad);
  Tensor out = new_output(grad, {num_rows, dim});
  given.dispatch_rows("grad", grad, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>();
    if constexpr (kOnDevice) {
      const Workspace memory(
          cuda::embedding_bag_backward_workspace_bytes<T>(arguments.bags, dim, num_rows), grad);
      cuda::embedding_bag_backward(data<T>(grad), num_rows, dim, arguments.bags, weights,
                                   arguments.combiner, deterministic, mutable_data<T>(out),
                                   errors_of(context), memory.data(), context.stream());
      arguments.check_found(num_rows, context);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(cpu::embedding_bag_backward_workspace_bytes<T>(arguments.bags, dim,
                                                                            num_rows, parallel_for),
                             grad);
      const int64_t bad = cpu::embedding_bag_backward(
          data<T>(grad), num_rows, dim, arguments.bags, weights, arguments.combiner,
          mutable_data<T>(out), memory.data(), parallel_for);
      arguments.check_row(bad, num_rows, context);
    }
  });
  return out;
}

Tensor embedding_bag_backward_sample_weights(Tensor grad, Tensor weight, Tensor rows,
                                             Tensor offsets, int64_t combiner,
                                             Tensor sample_weights) {
  Arguments given("embedding_bag_backward_sample_weights");
  given.read("weight", weight, kAnyDtype, 2);
  given.read("grad", grad, dtype_of(weight), 2);
  const BagArguments arguments(given, rows, offsets, combiner, sample_weights);
  given.check_size("grad", grad, 0, arguments.bags.num_bags);
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  given.check_size("grad", grad, 1, dim);
  given.check_row_size("weight", dim);
  arguments.check_dim_of_rows(dim);
  const DeviceContext context(weight);
  if constexpr (!kOnDevice) {
    const int64_t *begin = arguments.bags.rows, *end = begin + arguments.bags.n;
    const auto* bad = std::find_if(begin, end, [=](int64_t row) { return row >= num_rows; });
    if (bad != end) arguments.check_row(bad - begin, num_rows, context);
  }
  grad = packed(grad);
  weight = packed(weight);
  Tensor out = new_output(sample_weights, {sample_weights.numel()});
  given.dispatch_rows("weight", weight, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>();
    if constexpr (kOnDevice) {
      cuda::embedding_bag_backward_sample_weights(
          data<T>(grad), data<T>(weight), num_rows, dim, arguments.bags, weights,
          arguments.combiner, mutable_data<Acc<T>>(out), errors_of(context), context.stream());
      arguments.check_found(num_rows, context);
    } else {
      cpu::embedding_bag_backward_sample_weights(data<T>(grad), data<T>(weight), dim,
                                                 arguments.bags, weights, arguments.combiner,
                                                 mutable_data<Acc<T>>(out), torch_parallel_for());
    }
  });
  return out;
}

}  // namespace
}  // namespace sparsekit::ops

SPARSEKIT_LIBRARY_IMPL(m) {
  m.impl("embedding_bag", TORCH_BOX(&sparsekit::ops::embedding_bag));
  m.impl("embedding_bag_backward", TORCH_BOX(&sparsekit::ops::embedding_bag_backward));
  m.impl("embedding_bag_backward_sample_weights",
         TORCH_BOX(&sparsekit::ops::embedding_bag_backward_sample_weights));
}
