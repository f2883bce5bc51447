"""TorchRec's DistributedModelParallel over an EmbeddingBagCollection, on gloo ranks.

Each table is on one rank, since TorchRec's CPU mode refuses row-wise sharding. Row-wise Adagrad is
fused into backward, and bounds are not checked (sparsekit checks them).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from . import fbgemm, optional

NAME = "TorchRec DMP"


def missing() -> str | None:
    """Return why TorchRec cannot be measured; None if it can."""
    return optional.missing("torchrec") or fbgemm.missing()


def model(features: Mapping[str, Sequence[str]], ids: int, dim: int, lr: float = 0.01) -> Any:
    """Return a module that sums the bags of `keyed`; ranks get consecutive tables, in order.

    Args:
        features: names of each table's features.
        ids: rows per table.
        dim: vector size in all tables.
        lr: learning rate.
    """
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    tables = [
        EmbeddingBagConfig(
            name=name, embedding_dim=dim, num_embeddings=ids, feature_names=list(of_table)
        )
        for name, of_table in features.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": lr,
        "bounds_check_mode": BoundsCheckMode.NONE,
    }
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        collection,
        {
            name: table_wise(rank=i * world // len(tables), compute_kernel="fused")
            for i, name in enumerate(features)
        },
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    group = dist.group.WORLD
    assert group is not None
    return DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(group),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def own_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights ``[ids, dim]`` of this rank's tables; the caller may write to them."""
    return {
        key.split(".")[-2]: shard.tensor
        for key, sharded in model.state_dict().items()
        for shard in sharded.local_shards()
    }


def keyed(names: Sequence[str], values: torch.Tensor, lengths: torch.Tensor) -> Any:
    """Return a KeyedJaggedTensor with the bags of all features, feature by feature."""
    from torchrec import KeyedJaggedTensor

    return KeyedJaggedTensor(keys=list(names), values=values, lengths=lengths)
