"""Times steps, collectives and prefetch for many tables, on ranks with one thread each.

sparsekit uses LazyAdam. TorchRec places half of the tables on each rank, and uses row-wise Adagrad
fused into backward.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import sparsekit

from . import on_ranks
from .common import Comparison
from .cpu import Cpu
from .on_ranks import Step, time_in_turns, traffic
from .peers import torchrec
from .rank_tables import BATCHES, Shape, Tables
from .targets import CPU_TARGETS, target_of

WORLD = 2
LAZY, IN_BACKWARD, ONE_LAYER = "LazyAdam", "LazyAdam in backward", "one layer, same keys"
ONE_RANK, TWO_RANKS = "1 rank of one thread", "2 ranks of one thread"
PREFETCH, IN_A_ROW = "prefetch", "the two in a row"
ALONE, DENSE = "the exchange alone", "the dense part alone"
ONE_TABLE = "one table, same keys"


# ---- functions that run on the ranks ----


@dataclass(frozen=True)
class Sizes:
    """Full or toy sizes for all cases; the same rank processes run every case."""

    quick: bool

    @property
    def rounds(self) -> int:
        """Return the number of timed steps for each side."""
        return 2 if self.quick else 15

    @property
    def small_and_large(self) -> list[Shape]:
        """Return two shapes with 26 tables each, one small and one large."""
        if self.quick:
            return [Shape(26, 50, 8, 4), Shape(26, 50, 12, 8)]
        return [Shape(26, 100_000, 2048, 16), Shape(26, 100_000, 4096, 64)]

    @property
    def same_keys(self) -> list[Shape]:
        """Return shapes that divide the same number of keys and rows among 1, 26 and 100 tables."""
        ids, keys, dim = (2600, 208, 4) if self.quick else (2_600_000, 53_248, 16)
        return [Shape(count, ids // count, keys // count, dim) for count in (1, 26, 100)]


def _two_ranks(rank: int, sizes: Sizes) -> Any:
    """Measure all cases that need two ranks, including TorchRec's."""
    return {
        "steps": [_steps(rank, shape, sizes.rounds) for shape in sizes.small_and_large],
        "same keys": _same_keys(rank, sizes.same_keys, sizes.rounds),
        "prefetch": [_prefetch(rank, shape, sizes.rounds) for shape in sizes.small_and_large],
    }


def _steps(rank: int, shape: Shape, rounds: int) -> Any:
    """Time steps of a group, of one layer, and of TorchRec if it is installed."""
    tables = Tables(shape, [rank])
    sides = {
        LAZY: tables.training(False),
        IN_BACKWARD: tables.training(True),
        ONE_LAYER: tables.one_layer(),
    }
    sent = {name: traffic(step).bytes for name, step in sides.items()}
    if torchrec.missing() is None:
        sides[torchrec.NAME] = tables.torchrec()
    return {"samples": time_in_turns(sides, rounds), "bytes": sent}


def _scaling(rank: int, shape: Shape, rounds: int) -> Any:
    """Time two ranks that share the tables, in turns with a single rank that gets both batches."""
    pair, alone = dist.new_group([0, 1]), dist.new_group([2])
    ranks, over, name = ([0, 1], alone, ONE_RANK) if rank == 2 else ([rank], pair, TWO_RANKS)
    tables = Tables(shape, ranks, over)
    sides: dict[str, Step | None] = {TWO_RANKS: None, ONE_RANK: None}
    sides[name] = tables.training(False)
    samples: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(samples, time_in_turns(sides, rounds, over))
    return {TWO_RANKS: samples[0][TWO_RANKS], ONE_RANK: samples[2][ONE_RANK]}


def _same_keys(rank: int, shapes: Sequence[Shape], rounds: int) -> Any:
    """Time steps for each number of tables, and count the collectives in some steps.

    Outputs are one tensor: with a hundred outputs, autograd would take longer than the lookup.
    """
    sides = {
        str(shape.tables): Tables(shape, [rank], output="concatenated").training(True)
        for shape in shapes
    }
    counted = {
        name: [traffic(step).collectives for _ in range(BATCHES)] for name, step in sides.items()
    }
    return {"samples": time_in_turns(sides, rounds), "collectives": counted}


def _prefetch(rank: int, shape: Shape, rounds: int) -> Any:
    """Time an exchange plus a dense part of the same duration, with and without prefetch."""
    tables = Tables(shape, [rank])
    group, ahead = tables.group(), tables.group()
    exchange = tables.step(group)
    size, times = min(256, 4 * shape.batch), 20
    matrix, product = torch.randn(size, size), torch.empty(size, size)

    def dense(_: int) -> None:
        for _ in range(times):
            torch.mm(matrix, matrix, out=product)

    for _ in range(2):  # the second measurement refines the first estimate
        each = time_in_turns({ALONE: exchange, DENSE: dense}, rounds)
        found = [round(times * statistics.median(each[ALONE]) / statistics.median(each[DENSE]))]
        dist.broadcast_object_list(found)  # all ranks use rank 0's number
        times = max(1, found[0])

    def step_of(group: sparsekit.EmbeddingGroup, prefetch: bool) -> Step:
        def step(i: int) -> None:
            vectors = tables.look_up(group, tables.inputs[i % BATCHES])
            if prefetch:
                group.prefetch(tables.inputs[(i + 1) % BATCHES])
            dense(i)
            torch.autograd.backward(vectors, tables.grads)
            group.zero_grad()

        return step

    sides = {
        PREFETCH: step_of(ahead, True),
        IN_A_ROW: step_of(group, False),
        ALONE: exchange,
        DENSE: dense,
    }
    return time_in_turns(sides, rounds)


# ---- comparisons ----


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Start ranks that time all cases; "bytes" in the results counts what a rank sends per step."""
    cpu.has(torchrec.NAME, torchrec.missing())
    sizes = Sizes(cpu.quick)
    found = on_ranks.run(_two_ranks, WORLD, sizes)
    for shape, of_shape in zip(sizes.small_and_large, found["steps"], strict=True):
        samples = of_shape["samples"]
        ours = {name: samples.pop(name) for name in (LAZY, IN_BACKWARD)}
        line = "step of 26 tables on 2 ranks"
        for name, times in ours.items():
            case = f"step of {shape.text()} a rank, {WORLD} ranks, {name}"
            for against, theirs in samples.items():
                yield _comparison(case, against, times, theirs, line, of_shape["bytes"][name])

    large = sizes.small_and_large[1]
    samples = on_ranks.run(_scaling, WORLD + 1, large, sizes.rounds)
    case = f"step of {large.text()} a rank, {TWO_RANKS}, {LAZY}"
    line = "2 ranks of one thread"
    yield _comparison(case, ONE_RANK, samples[TWO_RANKS], samples[ONE_RANK], line)

    yield from _same_keys_compared(sizes, **found["same keys"])

    line = "step with prefetch, 2 ranks"
    for shape, samples in zip(sizes.small_and_large, found["prefetch"], strict=True):
        case = f"exchange of {shape.text()} a rank and a dense part, {PREFETCH}"
        times = samples.pop(PREFETCH)
        for against, theirs in samples.items():
            yield _comparison(case, against, times, theirs, line)


def _same_keys_compared(
    sizes: Sizes, samples: dict[str, list[float]], collectives: dict[str, list[float]]
) -> Iterator[Comparison]:
    line = "collectives of a step"
    for shape in sizes.same_keys:
        case, name = f"step of {shape.text()} a rank, {WORLD} ranks", str(shape.tables)
        counts = {"4 collectives": [4.0] * BATCHES}
        if shape.tables > 1:
            yield _comparison(case, ONE_TABLE, samples[name], samples["1"])
            counts[ONE_TABLE] = collectives["1"]
        for against, count in counts.items():
            yield _comparison(case, against, collectives[name], count, line, clock="collectives")


def _comparison(
    case: str,
    against: str,
    ours: list[float],
    theirs: list[float],
    line: str = "",
    num_bytes: int | None = None,
    clock: str = "wall",
) -> Comparison:
    target = target_of(CPU_TARGETS, line, against)
    return Comparison(case, against, ours, theirs, line, target, num_bytes, clock)
