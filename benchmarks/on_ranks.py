"""Runs functions on ranks, which are processes with one thread each, and times their steps."""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

import sparsekit

Step = Callable[[int], object]  # called with the batch number

# Number of untimed warm-up steps: one for each batch, so that timed steps insert no rows.
WARM_UP = 4


def run(function: Callable[..., Any], world: int, *arguments: Any) -> Any:
    """Call ``function(rank, *arguments)`` on all ranks; return rank 0's result, sent as JSON.

    Functions are pickled by name, so they must be at the top level of a module.
    """
    # Fork the ranks from a server process that has already imported torch, sparsekit, and
    # torch._dynamo (which the first optimizer imports): the imports would take seconds in every
    # rank.
    preload = ["torch.distributed", "torch._dynamo", "sparsekit"]
    get_context("forkserver").set_forkserver_preload(preload)
    with tempfile.TemporaryDirectory() as folder:
        arguments_of_rank = (world, folder, function, arguments)
        start_processes(_rank, arguments_of_rank, nprocs=world, start_method="forkserver")
        return json.loads(Path(folder, "found.json").read_text())


def _rank(
    rank: int, world: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=store)
    found = function(rank, *arguments)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def time_in_turns(
    sides: Mapping[str, Step | None], rounds: int, together: dist.ProcessGroup | None = None
) -> dict[str, list[float]]:
    """Return each side's step times in milliseconds, from a barrier before a step to one after it.

    Args:
        sides: steps that take turns. None means that this rank waits in gloo's barrier during the
            step, and gets no samples.
        rounds: number of timed steps for each side.
        together: the ranks that run their steps at the same time as this rank; None for all.
    """
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for i in range(-WARM_UP, rounds):
        for name, step in sides.items():
            dist.barrier()
            if step is None:
                continue
            start = time.perf_counter()
            step(i + WARM_UP)
            dist.barrier(together)
            if i >= 0:
                samples[name].append(1e3 * (time.perf_counter() - start))
    return samples


@dataclass(frozen=True)
class Traffic:
    """Traffic of one rank in one step: how many collectives it starts and bytes it sends."""

    collectives: int
    bytes: int


def traffic(step: Step) -> Traffic:
    """Run a step and count its traffic."""
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    before = Traffic(exchange.collectives, exchange.bytes_sent)
    step(0)
    return Traffic(exchange.collectives - before.collectives, exchange.bytes_sent - before.bytes)
