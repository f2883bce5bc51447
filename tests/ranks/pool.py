"""Pools of ranks for tests: processes in a gloo group that all run the same function.

The processes are forked from one that has already imported torch, since the import takes
seconds. A pool serves a whole module; after a call that left a rank dead or in a collective, the
next call starts new processes.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from patience import patience


@dataclass
class Raised:
    """Error that a rank raised."""

    type: str
    message: str
    trace: str


class Died:
    """Result of a rank that has died."""


class Ranks:
    """Pool of ranks: `ranks(function, *arguments)` calls function(rank, *arguments) on each.

    Functions are sent by name, so they must be at the top level of a module.
    """

    def __init__(self, world_size: int, timeout: float = 60) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        # The first optimizer imports torch._dynamo, and the modules of tests import the others;
        # without this preload, each rank would need seconds.
        context.set_forkserver_preload(
            ["torch.distributed.checkpoint", "torch._dynamo", "pytest", "hypothesis", "sparsekit"]
        )
        self.usable = True
        self.folder = tempfile.TemporaryDirectory()
        self.connections, self.processes = [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            of_rank = (rank, self.world_size, self.folder.name, self.timeout, theirs)
            arguments = (*of_rank, sys.path, dict(os.environ))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)

    def outcomes(self, function: Any, *arguments: Any) -> list[Any]:
        """Return each rank's result: its return value, a `Raised` or a `Died`."""
        if not self.usable:
            self.close()
            self._start()
        self.usable = False  # stays False if the wait for the answers is interrupted
        for connection in self.connections:
            connection.send((function, arguments))
        begin = time.monotonic()
        results: list[Any] = []
        answers = 0
        for connection in self.connections:
            try:
                # Compute the time limit in each turn: the machine may get busier during the wait.
                while not (ready := connection.poll(1)):
                    if time.monotonic() - begin > patience(100 + self.timeout):
                        break
                results.append(connection.recv() if ready else Raised("hangs", "", "it hangs"))
                answers += ready
            except (EOFError, ConnectionResetError):
                results.append(Died())
        self.usable = answers == self.world_size
        return results

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        """Return each rank's return value; the test fails if a rank raised or died."""
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
    rank: int,
    world_size: int,
    folder: str,
    timeout: float,
    connection: Any,
    path: list[str],
    environment: dict[str, str],
) -> None:
    sys.path[:] = path
    # Take the test's path and environment: the forked process has the first pool's.
    os.environ.clear()
    os.environ.update(environment)
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
