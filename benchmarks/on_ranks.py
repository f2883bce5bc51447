"""Ranks on this machine, each a process with one thread and gloo, and a clock for their steps."""

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

Step = Callable[[int], object]  # called with the number of the batch

# Number of warm-up steps, which are not timed. One for each batch, so that no row is new later.
WARM_UP = 4


def run(function: Callable[..., Any], world: int, *arguments: Any) -> Any:
    """Return the result of ``function(rank, *arguments)`` on rank 0, as JSON keeps it.

    Functions are sent by name, so they must be at the top level of a module.
    """
    # Fork the ranks from a process that has imported torch, and torch._dynamo for the first
    # optimizer: each import takes seconds. That process has computed nothing.
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
    """Return the milliseconds of each step, from when all ranks may begin until all have ended.

    Args:
        sides: steps that take turns. A rank without a step sleeps in a barrier of gloo meanwhile
            and has no samples.
        rounds: number of counted steps of each side.
        together: the ranks that step when this one does; None for all.
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
    """Collectives that one rank begins in a step, and bytes that it sends."""

    collectives: int
    bytes: int


def traffic(step: Step) -> Traffic:
    """Run a step and count its traffic."""
    exchange = sparsekit.distributed.exchange_of(None, torch.device("cpu"))
    assert exchange is not None
    before = Traffic(exchange.collectives, exchange.bytes_sent)
    step(0)
    return Traffic(exchange.collectives - before.collectives, exchange.bytes_sent - before.bytes)
