"""Ranks for tests: processes with a gloo group, which run a function together.

A pool lives for a whole module, since starting processes that import torch takes seconds. After a
call that left a rank dead or in a collective the pool is of no use any more.
"""

import multiprocessing
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest


@dataclass
class Raised:
    """What a rank raised."""

    type: str
    message: str
    trace: str


class Died:
    """In place of the result of a rank that is no more."""


class Ranks:
    """`ranks(function, *arguments)` calls function(rank, *arguments) on every rank.

    Functions are sent by name, so they must be at the top of a module.
    """

    def __init__(self, world_size: int, timeout: float = 60) -> None:
        context = multiprocessing.get_context("spawn")
        self.world_size = world_size
        self.timeout = timeout
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (rank, world_size, self.folder.name, timeout, theirs, sys.path)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def outcomes(self, function: Any, *arguments: Any) -> list[Any]:
        """Result of each rank, or what it `Raised`, or that it `Died`."""
        for connection in self.connections:
            connection.send((function, arguments))
        results: list[Any] = []
        for connection in self.connections:
            try:
                ready = connection.poll(60 + self.timeout)
                results.append(connection.recv() if ready else Raised("hangs", "", ""))
            except (EOFError, ConnectionResetError):
                results.append(Died())
        return results

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        """Result of each rank; a test failure if one raised."""
        results = self.outcomes(function, *arguments)
        for rank, result in enumerate(results):
            if isinstance(result, (Died, Raised)):
                trace = "it died" if isinstance(result, Died) else result.trace
                pytest.fail(f"rank {rank}: {trace}", pytrace=False)
        return results

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(
    rank: int, world_size: int, folder: str, timeout: float, connection: Any, path: list[str]
) -> None:
    sys.path[:] = path
    import torch
    import torch.distributed as dist

    import sparsekit

    from . import on_device

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        rank=rank,
        world_size=world_size,
        init_method=f"file://{folder}/store",
        timeout=timedelta(seconds=timeout),
    )
    sparsekit.init(timeout=timeout)
    on_device.begin()
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            with on_device.where():
                result = on_device.on_cpu(function(rank, *arguments))
        except BaseException as error:
            result = Raised(type(error).__name__, str(error), traceback.format_exc())
        connection.send(result)
