"""FBGEMM's table batched embeddings (TBE) on the CPU: its training module, in float32.

This is FBGEMM's fastest configuration: each table has one feature, bounds are not checked
(sparsekit checks them), and the optimizer is fused into backward.
"""

from collections.abc import Sequence
from typing import Any

import torch

from . import optional


def missing() -> str | None:
    """Return why FBGEMM cannot be measured; None if it can."""
    return optional.missing("fbgemm_gpu", "fbgemm-gpu-cpu")


def tables(shapes: Sequence[tuple[int, int]], lr: float = 0.01) -> Any:
    """Return a module that sums bags; it maps (rows, offsets) to ``[batch, sum of dims]``.

    Args:
        shapes: rows and dim of each table.
        lr: learning rate. Backward updates the rows with row-wise Adagrad.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU) for rows, dim in shapes],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=lr,
        bounds_check_mode=BoundsCheckMode.NONE,
    )


def table(weight: torch.Tensor, lr: float = 0.01) -> Any:
    """Return a module with one table, initialized with a copy of `weight`."""
    num_rows, dim = weight.shape
    module = tables([(num_rows, dim)], lr)
    module.split_embedding_weights()[0].copy_(weight)
    return module


def int8_tables(shapes: Sequence[tuple[int, int]]) -> Any:
    """Return an inference module whose int8 rows have random content.

    It maps int32 (row numbers, offsets), feature by feature, to float32 ``[batch, sum of dims]``.

    Args:
        shapes: rows and dim of each table.
    """
    from fbgemm_gpu.split_embedding_configs import SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_inference import (
        IntNBitTableBatchedEmbeddingBagsCodegen,
    )

    module = IntNBitTableBatchedEmbeddingBagsCodegen(
        [
            (f"table {i}", rows, dim, SparseType.INT8, EmbeddingLocation.HOST)
            for i, (rows, dim) in enumerate(shapes)
        ],
        device="cpu",
        output_dtype=SparseType.FP32,
    )
    module.initialize_weights()
    module.fill_random_weights()
    return module
