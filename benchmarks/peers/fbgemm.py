"""FBGEMM's table batched embeddings on the CPU: the training module, one table, float32.

In the configuration that was fastest: the batch as one feature, no checks of bounds (ours checks
them), and what it offers of optimizers on the CPU fused into backward.
"""

from typing import Any

import torch

from . import optional


def missing() -> str | None:
    """Why it cannot be measured; None if it can."""
    return optional.missing("fbgemm_gpu", "fbgemm-gpu-cpu")


def table(weight: torch.Tensor, lr: float = 0.01) -> Any:
    """A module like EmbeddingBag in mode sum, (rows, offsets) -> bags, with a copy of the weight.

    Its backward updates the rows by row-wise Adagrad.
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

    num_rows, dim = weight.shape
    module: Any = SplitTableBatchedEmbeddingBagsCodegen(
        [(num_rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=lr,
        bounds_check_mode=BoundsCheckMode.NONE,
    )
    module.split_embedding_weights()[0].copy_(weight)
    return module
