"""A whole training step, and the exchange alone, on two gloo ranks with one thread each.

The peer is TorchRec's DistributedModelParallel over an EmbeddingBagCollection of two tables, one on
each rank (its CPU mode refuses row-wise sharding), with fused row-wise Adagrad, on row numbers that
are ready. Ours looks raw keys up in hash tables and runs LazyAdam. Both see the same batches and
begin with the same vectors. Ranks time all of this in turns, from barrier to barrier.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

import sparsekit

from .common import Comparison, assert_same_sums, zipf_keys
from .cpu import Cpu
from .peers import fbgemm, optional
from .targets import CPU_TARGETS, target_of

WORLD, TABLES, NNZ = 2, 2, 2
TORCHREC, NO_DEDUPE = "TorchRec DMP", "without dedupe"
Step = Callable[[int], object]


class Case:
    """Sizes, and the batches of a rank: for each table keys ``[batch, features, NNZ]``."""

    def __init__(self, rank: int, quick: bool, exponent: float) -> None:
        self.batch, self.features, self.ids = (8, 3, 100) if quick else (4096, 13, 500_000)
        self.dim = 8 if quick else 64
        self.rounds = 2 if quick else 15
        self.keys = self.batch * self.features * NNZ
        shape = (self.batch, self.features, NNZ)
        self.batches = [
            {
                f"t{t}": zipf_keys(self.keys, exponent, self.ids, 100 * rank + 10 * i + t).view(
                    shape
                )
                for t in range(TABLES)
            }
            for i in range(4)
        ]
        self.grad = torch.randn(self.batch, self.features, self.dim)


def make_group(case: Case, dedupe: bool) -> sparsekit.EmbeddingGroup:
    """The tables; those of the same name begin with the same vectors."""
    capacity = case.ids * 6 // 10  # on each rank, for half of the ids
    layers = {}
    for name in case.batches[0]:
        layers[name] = sparsekit.DistributedEmbedding(
            "sum", capacity, case.dim, case.features, NNZ, name=name
        )
        layers[name].dedupe = dedupe
    return sparsekit.EmbeddingGroup(layers)


def exchange_step(case: Case, group: sparsekit.EmbeddingGroup) -> Step:
    """Vectors fetched and their gradients brought back, without an optimizer."""

    def step(i: int) -> None:
        outputs = group(case.batches[i % len(case.batches)])
        torch.autograd.backward(list(outputs.values()), [case.grad] * TABLES)
        group.zero_grad()

    return step


def training_step(case: Case, group: sparsekit.EmbeddingGroup) -> Step:
    """A step with LazyAdam."""
    optimizer = sparsekit.optim.LazyAdam(group.parameters())

    def step(i: int) -> None:
        outputs = group(case.batches[i % len(case.batches)])
        torch.autograd.backward(list(outputs.values()), [case.grad] * TABLES)
        optimizer.step()
        optimizer.zero_grad()

    return step


def initial_vectors(case: Case, group: sparsekit.EmbeddingGroup) -> dict[str, torch.Tensor]:
    """Vectors ``[ids, dim]`` of all ids, of each table; nothing is inserted."""
    per_call = case.batch * case.features
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in case.batches[0]}
    group.eval()
    for first in range(0, case.ids, per_call):
        keys = torch.arange(first, first + per_call).view(case.batch, case.features, 1)
        keys = keys.expand(-1, -1, NNZ)
        with torch.no_grad():
            for name, out in group(dict.fromkeys(parts, keys)).items():
                parts[name].append(out.reshape(per_call, case.dim) / NNZ)
    group.train()
    return {name: torch.cat(vectors)[: case.ids] for name, vectors in parts.items()}


def make_torchrec(case: Case, vectors: dict[str, torch.Tensor]) -> tuple[Any, list[Any]]:
    """Its model with these vectors, and its form of the batches."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan

    names = {t: [f"{t}_f{f}" for f in range(case.features)] for t in vectors}
    tables = [
        EmbeddingBagConfig(
            name=t, embedding_dim=case.dim, num_embeddings=case.ids, feature_names=names[t]
        )
        for t in vectors
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "learning_rate": 0.01,
        "bounds_check_mode": BoundsCheckMode.NONE,  # ours checks
    }
    sharder: Any = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = construct_module_sharding_plan(
        collection,
        {t: table_wise(rank=i, compute_kernel="fused") for i, t in enumerate(vectors)},
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
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )
    for key, sharded in model.state_dict().items():
        for shard in sharded.local_shards():
            shard.tensor.copy_(next(v for t, v in vectors.items() if f".{t}." in key))
    lengths = torch.full((TABLES * case.features * case.batch,), NNZ)
    inputs = [
        KeyedJaggedTensor(
            keys=[name for of_table in names.values() for name in of_table],
            values=torch.cat([keys.transpose(0, 1).reshape(-1) for keys in batch.values()]),
            lengths=lengths,
        )
        for batch in case.batches
    ]
    return model, inputs


def torchrec_step(case: Case, model: Any, inputs: list[Any]) -> Step:
    """A step, whose optimizer is a part of backward."""
    grad = torch.cat([case.grad.flatten(1)] * TABLES, dim=1)

    def step(i: int) -> None:
        model(inputs[i % len(inputs)]).values().backward(grad)

    return step


def _time(sides: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each step, of all sides in turns."""
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-4, rounds):  # the first four with a batch each, for rows seen the first time
        for name, step in sides.items():
            dist.barrier()
            start = time.perf_counter()
            step(i + 4)
            dist.barrier()
            if i >= 0:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return samples


def _assert_same_outputs(case: Case, groups: list[Any], model: Any, inputs: list[Any]) -> None:
    with torch.no_grad():
        for i, batch in enumerate(case.batches):
            outputs = [
                torch.cat([out.flatten(1) for out in group(batch).values()], dim=1)
                for group in groups
            ]
            if model is not None:
                outputs.append(model(inputs[i]).values())
            for other in outputs[1:]:
                assert_same_sums(outputs[0], other)


def _bytes_of(step: Step) -> int:
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    before = exchange.bytes_sent
    step(0)
    return exchange.bytes_sent - before


def missing() -> str | None:
    """Why TorchRec cannot be measured; None if it can."""
    return optional.missing("torchrec") or fbgemm.missing()


def _rank(rank: int, folder: str, quick: bool) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=store)
    found = {}
    for what, exponent in ("step", 1.2), ("exchange", 1.05):
        case = Case(rank, quick, exponent)
        groups = {"ours": make_group(case, True), NO_DEDUPE: make_group(case, False)}
        model, inputs = None, list[Any]()
        if what == "step" and missing() is None:
            model, inputs = make_torchrec(case, initial_vectors(case, groups["ours"]))
        _assert_same_outputs(case, list(groups.values()), model, inputs)
        make = training_step if what == "step" else exchange_step
        sides = {name: make(case, group) for name, group in groups.items()}
        sent = {name: _bytes_of(step) for name, step in sides.items()}
        if model is not None:
            sides[TORCHREC] = torchrec_step(case, model, inputs)
        samples = _time(sides, case.rounds)
        title = f"zipf {exponent}, {WORLD} ranks, {TABLES * case.keys:,} keys each x {case.dim}"
        found[what] = {"case": f"{what}, {title}", "samples": samples, "bytes": sent["ours"]}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


LINES = {"step": "step on 2 ranks", "exchange": "exchange with dedupe, 2 ranks, zipf"}


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Start the ranks, which do all the timing; bytes are what one rank sends in a step."""
    cpu.has(TORCHREC, missing())
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (folder, cpu.quick), nprocs=WORLD)
        found = json.loads(Path(folder, "found.json").read_text())
    for what, line in LINES.items():
        case, samples, sent = (found[what][x] for x in ("case", "samples", "bytes"))
        ours = samples.pop("ours")
        for against, theirs in samples.items():
            target = target_of(CPU_TARGETS, line, against)
            yield Comparison(case, against, ours, theirs, line, target, sent)
