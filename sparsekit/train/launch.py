"""Ranks on this machine, started by torch.distributed's own launcher."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch


class RankError(RuntimeError):
    """A rank has failed.

    Attributes:
        rank: which.
        kind: name of the class of what it raised; empty where it raised nothing.
        reason: the message of what it raised, or how it ended.
    """

    def __init__(self, rank: int, failure: ProcessFailure) -> None:
        self.rank = rank
        self.kind, self.reason = "", f"ended with exit code {failure.exitcode}"
        shown = self.reason
        # The launcher's types call this a string; it is a dictionary for what a rank has raised.
        message: Any = failure.message
        if failure.exitcode < 0:
            self.reason = shown = f"was ended by {failure.signal_name()}"
        elif isinstance(message, dict):
            self.kind, _, self.reason = message["message"].partition(": ")
            shown = f"failed\n{message['extraInfo']['py_callstack'].rstrip()}"
        super().__init__(f"rank {rank} {shown}")


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` in new processes, in the environment that torchrun gives.

    When one fails the others are ended, as they are by Ctrl-C and SIGTERM.

    Args:
        world_size: how many.
        function: of a module, so that it can be sent by its name. It begins with `start_rank`.
        arguments: can be pickled.

    Raises:
        RankError: a rank has failed.
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another signal that asks to end.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        _handlers_restored(),
        _interrupts_held_back(),
        _quiet_launcher(),
    ):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            # As torchrun --standalone: any free port.
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(config, function)(*arguments)
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            raise RankError(*_first_to_raise(folder, rank, failure)) from None
        except SignalException as error:
            if error.sigval == signal.SIGINT:
                raise KeyboardInterrupt from None
            raise SystemExit(128 + error.sigval) from None


def _first_to_raise(folder: str, rank: int, failure: ProcessFailure) -> tuple[int, ProcessFailure]:
    """The rank whose error came first, given the one that has ended first.

    One that ends closes its connections, of which others may hear, fail, and end before it has.
    """
    if not isinstance(failure.message, dict):  # it was ended, and raised nothing
        return rank, failure
    files = Path(folder).rglob(Path(failure.error_file).name)
    first = min(files, key=lambda file: file.stat().st_mtime_ns)
    of_first = int(first.parent.name)
    return of_first, ProcessFailure(of_first, failure.pid, failure.exitcode, str(first))


def start_rank() -> None:
    """Let Ctrl-C end this process at once.

    An exception would not do: it is not raised in a rank that waits for another one.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _handlers_restored() -> Iterator[None]:
    """Undo what the launcher does to the handling of signals."""
    numbers = [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT]
    before = [signal.getsignal(number) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Have processes start with SIGINT blocked, until `start_rank`.

    A terminal sends it to all of them, and each would answer with the traceback of a module that
    it was about to import. This process still gets it: another thread lets it in, and Python
    handles it in the main one.
    """
    # Otherwise it is started with the first process, and takes the block away.
    resource_tracker.ensure_running()
    done = threading.Event()
    thread = threading.Thread(target=done.wait, daemon=True)
    thread.start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        done.set()
        thread.join()


@contextlib.contextmanager
def _quiet_launcher() -> Iterator[None]:
    """Keep the launcher from logging what `run_on_ranks` raises."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
