"""A whole training step on two gloo ranks, against TorchRec where it is installed.

The peer is TorchRec's DistributedModelParallel over an EmbeddingBagCollection of two tables, one on
each rank (its CPU mode refuses row-wise sharding), with fused row-wise Adagrad, on row numbers that
are ready. Ours looks raw keys up in hash tables and runs LazyAdam. Both see the same batches; one
thread a rank.

``python -m benchmarks.bench_ranks [--quick]``. TorchRec on the CPU: ``pip install --no-deps
fbgemm-gpu-cpu torchrec torchmetrics==1.0.3``, then ``pip install tensordict pyre-extensions``.
"""

import argparse
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import sparsekit

from .common import zipf_keys

WORLD, TABLES, DIM, NNZ = 2, 2, 64, 2


class Case:
    """Sizes, and the batches of a rank: for each table keys ``[batch, features, NNZ]``."""

    def __init__(self, rank: int, quick: bool) -> None:
        self.batch, self.features, self.ids = (8, 3, 100) if quick else (4096, 13, 500_000)
        self.steps = 2 if quick else 15
        shape = (self.batch, self.features, NNZ)
        count = self.batch * self.features * NNZ
        seeds = [100 * rank + 10 * step for step in range(2 if quick else 4)]
        self.batches = [
            {f"t{t}": zipf_keys(count, 1.2, self.ids, seed + t).view(shape) for t in range(TABLES)}
            for seed in seeds
        ]


def ours(case: Case, dedupe: bool = True) -> Callable[[int], None]:
    """Step number i with an EmbeddingGroup and LazyAdam."""
    layers = {
        f"t{t}": sparsekit.DistributedEmbedding(
            "sum", case.ids * 6 // 10, DIM, case.features, NNZ, name=f"t{t}"
        )
        for t in range(TABLES)
    }
    for layer in layers.values():
        layer.dedupe = dedupe
    group = sparsekit.EmbeddingGroup(layers)
    optimizer = sparsekit.optim.LazyAdam(group.parameters())
    upstream = torch.ones(case.batch, case.features, DIM)

    def step(i: int) -> None:
        outputs = group(case.batches[i % len(case.batches)])
        torch.autograd.backward(list(outputs.values()), [upstream] * TABLES)
        optimizer.step()
        optimizer.zero_grad()

    return step


def torchrec(case: Case) -> Callable[[int], None]:
    """Step number i with TorchRec, whose optimizer is part of the backward."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    device = torch.device("cpu")
    features = [[f"t{t}_f{f}" for f in range(case.features)] for t in range(TABLES)]
    tables = [
        EmbeddingBagConfig(
            name=f"t{t}", embedding_dim=DIM, num_embeddings=case.ids, feature_names=features[t]
        )
        for t in range(TABLES)
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.01}
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        collection,
        {f"t{t}": table_wise(rank=t, compute_kernel="fused") for t in range(TABLES)},
        sharder=sharder,
        local_size=WORLD,
        world_size=WORLD,
        device_type="cpu",
    )
    group = dist.group.WORLD
    assert group is not None
    model = DistributedModelParallel(
        collection,
        env=ShardingEnv.from_process_group(group),
        device=device,
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    lengths = torch.full((TABLES * case.features * case.batch,), NNZ)
    names = [name for of_table in features for name in of_table]
    inputs = [
        KeyedJaggedTensor(
            keys=names,
            values=torch.cat([keys.transpose(0, 1).reshape(-1) for keys in batch.values()]),
            lengths=lengths,
        )
        for batch in case.batches
    ]

    def step(i: int) -> None:
        values = model(inputs[i % len(inputs)]).values()
        values.backward(torch.ones_like(values))

    return step


def _median(step: Callable[[int], None], steps: int) -> tuple[float, float]:
    """Median milliseconds of a step and the spread, (longest - shortest) / median."""
    times = []
    for i in range(3 + steps):
        dist.barrier()
        start = time.perf_counter()
        step(i)
        dist.barrier()
        times.append(1e3 * (time.perf_counter() - start))
    times = times[3:]
    median = statistics.median(times)
    return median, (max(times) - min(times)) / median


def _rank(rank: int, store: str, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{store}")
    case = Case(rank, quick)
    lines = {}
    sent = {}
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    for name, make in (("sparsekit", True), ("sparsekit, without dedupe", False)):
        step = ours(case, make)
        lines[name] = _median(step, case.steps)
        before = exchange.bytes_sent
        step(0)
        sent[name] = exchange.bytes_sent - before
    if importlib.util.find_spec("torchrec") is not None:
        lines["TorchRec"] = _median(torchrec(case), case.steps)
    if rank == 0:
        keys = case.batch * case.features * NNZ * TABLES
        print(f"{WORLD} ranks, {keys:,} keys a rank and step, zipf 1.2, dim {DIM}, 1 thread a rank")
        for name, (ms, spread) in lines.items():
            ratio = ms / lines["sparsekit"][0]
            moved = f"{sent[name]:>13,} bytes sent" if name in sent else ""
            print(f"{name:<28}{ms:>9.1f} ms{spread:>6.0%} {ratio:>6.2f}x of sparsekit {moved}")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> None:
    """Start the ranks and print a line for each library."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_ranks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="toy sizes: does it run at all?")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (f"{folder}/store", options.quick), nprocs=WORLD)


if __name__ == "__main__":
    main()
