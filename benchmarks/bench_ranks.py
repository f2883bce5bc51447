"""Times a training step, and the exchange alone, on two ranks with one thread each.

The peer is TorchRec's DistributedModelParallel over an EmbeddingBagCollection of two tables, one on
each rank (its CPU mode refuses row-wise sharding). TorchRec gets row numbers, and uses fused
row-wise Adagrad. sparsekit looks up raw keys in hash tables, and uses LazyAdam. Both get the same
batches and start with the same vectors. Ranks time the sides in turn, from barrier to barrier.
"""

from collections.abc import Iterator
from typing import Any

import torch

import sparsekit

from . import on_ranks
from .common import Comparison, assert_same_sums, zipf_keys
from .cpu import Cpu
from .on_ranks import Step, time_in_turns, traffic
from .peers import torchrec
from .targets import CPU_TARGETS, target_of

WORLD, TABLES, NNZ = 2, 2, 2
NO_DEDUPE = "without dedupe"


class Case:
    """Sizes of a case, and a rank's batches: keys ``[batch, features, NNZ]`` for each table."""

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
    """Return a group of the case's tables; layers with the same name get equal initial vectors."""
    capacity = case.ids * 6 // 10  # each rank's half of the ids, plus a margin
    layers = {}
    for name in case.batches[0]:
        layers[name] = sparsekit.DistributedEmbedding(
            "sum", capacity, case.dim, case.features, NNZ, name=name
        )
        layers[name].dedupe = dedupe
    return sparsekit.EmbeddingGroup(layers)


def exchange_step(case: Case, group: sparsekit.EmbeddingGroup) -> Step:
    """Return a step that fetches vectors and sends gradients back, without an optimizer."""

    def step(i: int) -> None:
        outputs = group(case.batches[i % len(case.batches)])
        torch.autograd.backward(list(outputs.values()), [case.grad] * TABLES)
        group.zero_grad()

    return step


def training_step(case: Case, group: sparsekit.EmbeddingGroup) -> Step:
    """Return a training step with LazyAdam."""
    optimizer = sparsekit.optim.LazyAdam(group.parameters())

    def step(i: int) -> None:
        outputs = group(case.batches[i % len(case.batches)])
        torch.autograd.backward(list(outputs.values()), [case.grad] * TABLES)
        optimizer.step()
        optimizer.zero_grad()

    return step


def initial_vectors(case: Case, group: sparsekit.EmbeddingGroup) -> dict[str, torch.Tensor]:
    """Return each table's initial vectors ``[ids, dim]`` for all ids, without inserting any."""
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
    """Return TorchRec's model with the given initial vectors, and batches in its input format."""
    names = {t: [f"{t}_f{f}" for f in range(case.features)] for t in vectors}
    model = torchrec.model(names, case.ids, case.dim)
    for name, weight in torchrec.own_weights(model).items():
        weight.copy_(vectors[name])
    lengths = torch.full((TABLES * case.features * case.batch,), NNZ)
    inputs = [
        torchrec.keyed(
            [name for of_table in names.values() for name in of_table],
            torch.cat([keys.transpose(0, 1).reshape(-1) for keys in batch.values()]),
            lengths,
        )
        for batch in case.batches
    ]
    return model, inputs


def torchrec_step(case: Case, model: Any, inputs: list[Any]) -> Step:
    """Return a step of TorchRec; its optimizer runs in backward."""
    grad = torch.cat([case.grad.flatten(1)] * TABLES, dim=1)

    def step(i: int) -> None:
        model(inputs[i % len(inputs)]).values().backward(grad)

    return step


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


def _measure(rank: int, quick: bool) -> dict[str, Any]:
    found = {}
    for what, exponent in ("step", 1.2), ("exchange", 1.05):
        case = Case(rank, quick, exponent)
        groups = {"ours": make_group(case, True), NO_DEDUPE: make_group(case, False)}
        model, inputs = None, list[Any]()
        if what == "step" and torchrec.missing() is None:
            model, inputs = make_torchrec(case, initial_vectors(case, groups["ours"]))
        _assert_same_outputs(case, list(groups.values()), model, inputs)
        make = training_step if what == "step" else exchange_step
        sides = {name: make(case, group) for name, group in groups.items()}
        sent = {name: traffic(step).bytes for name, step in sides.items()}
        if model is not None:
            sides[torchrec.NAME] = torchrec_step(case, model, inputs)
        samples = time_in_turns(sides, case.rounds)
        title = f"zipf {exponent}, {WORLD} ranks, {TABLES * case.keys:,} keys each x {case.dim}"
        found[what] = {"case": f"{what}, {title}", "samples": samples, "bytes": sent["ours"]}
    return found


LINES = {"step": "step on 2 ranks", "exchange": "exchange with dedupe, 2 ranks, zipf"}


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Start ranks that time all cases; "bytes" in the results counts what a rank sends per step."""
    cpu.has(torchrec.NAME, torchrec.missing())
    found = on_ranks.run(_measure, WORLD, cpu.quick)
    for what, line in LINES.items():
        case, samples, sent = (found[what][x] for x in ("case", "samples", "bytes"))
        ours = samples.pop("ours")
        for against, theirs in samples.items():
            target = target_of(CPU_TARGETS, line, against)
            yield Comparison(case, against, ours, theirs, line, target, sent)
