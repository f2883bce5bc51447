#include "sparsekit/embedding_bag.h"

#include <limits>

#include "device_context.h"

namespace sparsekit::ops {
namespace {

// The checked arguments that forward and backward share; keeps the memory that `bags` points to.
struct BagArguments {
  Tensor rows;
  Tensor offsets;
  std::optional<Tensor> sample_weights;
  Combiner combiner;
  Bags bags;

  BagArguments(const char* op, const Tensor& rows_in, const Tensor& offsets_in,
               int64_t combiner_code, const std::optional<Tensor>& sample_weights_in)
      : rows(rows_in), offsets(offsets_in), combiner(static_cast<Combiner>(combiner_code)) {
    check_same_device(op, {{"rows", rows},
                           {"offsets", offsets},
                           {"sample_weights", sample_weights_in.value_or(rows)}});
    check_dim(rows, 1, op, "rows");
    check_dim(offsets, 1, op, "offsets");
    check(offsets.numel() > 0, op, ": offsets must have one element more than there are bags");
    check(combiner_code >= 0 && combiner_code <= static_cast<int64_t>(Combiner::kSqrtn), op,
          ": combiner must be 0 (sum), 1 (mean) or 2 (sqrtn), got ", combiner_code);
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
    check(!kOnDevice || (rows.numel() <= kMost && offsets.numel() <= kMost), op, ": ", rows.numel(),
          " rows in ", offsets.numel() - 1,
          " bags; at most 2^31 - 1 rows and as many offsets are supported");
    rows = packed_int64(rows, op, "rows");
    offsets = packed_int64(offsets, op, "offsets");
    if (sample_weights_in.has_value()) {
      check_dim(*sample_weights_in, 1, op, "sample_weights");
      check_size(*sample_weights_in, 0, rows.numel(), op, "sample_weights");
      sample_weights = packed(*sample_weights_in);
    }
    bags = Bags{int64_data(rows), rows.numel(), int64_data(offsets), offsets.numel() - 1};
    if constexpr (!kOnDevice)
      check_offset(op, cpu::check_offsets(bags, torch_parallel_for()), DeviceContext(rows));
  }

  // As if every entry had a row of its own.
  void check_dim_of_rows(const char* op, int64_t dim) const {
    check_elements({bags.n, dim}, op, "rows to pool");
  }

  template <class T>
  const Acc<T>* sample_weights_data(const char* op) const {
    if (!sample_weights.has_value()) return nullptr;
    check_dtype(*sample_weights, kAccumulateType<T>, op, "sample_weights");
    return data<Acc<T>>(*sample_weights);
  }

  void check_offset(const char* op, int64_t bad, const DeviceContext& context) const {
    if (bad < 0) return;
    check(false, op, ": offsets must rise from 0 to len(rows) = ", bags.n, ", but offsets[", bad,
          "] is ", context.value(offsets, bad));
  }

  void check_row(const char* op, int64_t bad, int64_t num_rows,
                 const DeviceContext& context) const {
    if (bad < 0) return;
    index_error(op, ": rows[", bad, "] is ", context.value(rows, bad), ", but weight has ",
                num_rows, " rows");
  }

  // With checks on, raises what the device has found. Reads both words before it raises one, so
  // that none stays behind.
  void check_found(const char* op, int64_t num_rows, const DeviceContext& context) const {
    const int64_t bad_offset = context.error_position(DeviceError::kBagOffset, offsets.numel());
    const int64_t bad_row = context.error_position(DeviceError::kBagRow, rows.numel());
    check_offset(op, bad_offset, context);
    check_row(op, bad_row, num_rows, context);
  }
};

cuda::BagErrors errors_of(const DeviceContext& context) {
  return {context.error_word(DeviceError::kBagOffset), context.error_word(DeviceError::kBagRow)};
}

Tensor embedding_bag(Tensor weight, Tensor rows, Tensor offsets, int64_t combiner,
                     std::optional<Tensor> sample_weights) {
  const char* op = "embedding_bag";
  check_dim(weight, 2, op, "weight");
  check_same_device(op, {{"weight", weight}, {"rows", rows}});
  const BagArguments arguments(op, rows, offsets, combiner, sample_weights);
  weight = packed(weight);
  const int64_t num_rows = weight.size(0), dim = weight.size(1);
  check_row_size(dim, op, "weight");
  arguments.check_dim_of_rows(op, dim);
  check_elements({arguments.bags.num_bags, dim}, op, "a result");
  const DeviceContext context(weight);
  Tensor out = new_output(weight, {arguments.bags.num_bags, dim});
  dispatch_rows(weight, op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>(op);
    if constexpr (kOnDevice) {
      const Workspace memory(cuda::embedding_bag_workspace_bytes<T>(arguments.bags, dim), weight);
      cuda::embedding_bag(data<T>(weight), num_rows, dim, arguments.bags, weights,
                          arguments.combiner, mutable_data<T>(out), errors_of(context),
                          memory.data(), context.stream());
      arguments.check_found(op, num_rows, context);
    } else {
      const int64_t bad =
          cpu::embedding_bag(data<T>(weight), num_rows, dim, arguments.bags, weights,
                             arguments.combiner, mutable_data<T>(out), torch_parallel_for());
      arguments.check_row(op, bad, num_rows, context);
    }
  });
  return out;
}

Tensor embedding_bag_backward(Tensor grad, Tensor rows, Tensor offsets, int64_t combiner,
                              std::optional<Tensor> sample_weights, int64_t num_rows,
                              bool deterministic) {
  const char* op = "embedding_bag_backward";
  check_same_device(op, {{"grad", grad}, {"rows", rows}});
  const BagArguments arguments(op, rows, offsets, combiner, sample_weights);
  check_dim(grad, 2, op, "grad");
  check_size(grad, 0, arguments.bags.num_bags, op, "grad");
  check_sort_sizes(arguments.bags.n, num_rows, op, "num_rows");
  grad = packed(grad);
  const int64_t dim = grad.size(1);
  check_row_size(dim, op, "grad");
  arguments.check_dim_of_rows(op, dim);
  check_elements({num_rows, dim}, op, "a result");
  const DeviceContext context(grad);
  Tensor out = new_output(grad, {num_rows, dim});
  dispatch_rows(grad, op, "grad", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>(op);
    if constexpr (kOnDevice) {
      const Workspace memory(
          cuda::embedding_bag_backward_workspace_bytes<T>(arguments.bags, dim, num_rows), grad);
      cuda::embedding_bag_backward(data<T>(grad), num_rows, dim, arguments.bags, weights,
                                   arguments.combiner, deterministic, mutable_data<T>(out),
                                   errors_of(context), memory.data(), context.stream());
      arguments.check_found(op, num_rows, context);
    } else {
      const ParallelFor parallel_for = torch_parallel_for();
      const Workspace memory(cpu::embedding_bag_backward_workspace_bytes<T>(arguments.bags, dim,
                                                                            num_rows, parallel_for),
                             grad);
      const int64_t bad = cpu::embedding_bag_backward(
          data<T>(grad), num_rows, dim, arguments.bags, weights, arguments.combiner,
          mutable_data<T>(out), memory.data(), parallel_for);
      arguments.check_row(op, bad, num_rows, context);
    }
  });
  return out;
}

Tensor embedding_bag_backward_sample_weights(Tensor grad, Tensor weight, Tensor rows,
                                             Tensor offsets, int64_t combiner,
                                             Tensor sample_weights) {
  const char* op = "embedding_bag_backward_sample_weights";
  check_same_device(op, {{"grad", grad}, {"weight", weight}, {"rows", rows}});
  const BagArguments arguments(op, rows, offsets, combiner, sample_weights);
  check_dim(weight, 2, op, "weight");
  check_dim(grad, 2, op, "grad");
  check_size(grad, 0, arguments.bags.num_bags, op, "grad");
  check_size(grad, 1, weight.size(1), op, "grad");
  check_dtype(grad, weight.scalar_type(), op, "grad");
  check_row_size(weight.size(1), op, "weight");
  arguments.check_dim_of_rows(op, weight.size(1));
  const DeviceContext context(weight);
  if constexpr (!kOnDevice) {
    for (int64_t i = 0; i < arguments.bags.n; ++i) {
      if (arguments.bags.rows[i] >= weight.size(0)) {
        arguments.check_row(op, i, weight.size(0), context);
      }
    }
  }
  grad = packed(grad);
  weight = packed(weight);
  Tensor out = new_output(sample_weights, {sample_weights.numel()});
  dispatch_rows(weight, op, "weight", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto* weights = arguments.sample_weights_data<T>(op);
    if constexpr (kOnDevice) {
      cuda::embedding_bag_backward_sample_weights(
          data<T>(grad), data<T>(weight), weight.size(0), weight.size(1), arguments.bags, weights,
          arguments.combiner, mutable_data<Acc<T>>(out), errors_of(context), context.stream());
      arguments.check_found(op, weight.size(0), context);
    } else {
      cpu::embedding_bag_backward_sample_weights(data<T>(grad), data<T>(weight), weight.size(1),
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
