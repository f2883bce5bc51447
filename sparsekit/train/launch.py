"""Starts ranks as processes on this machine with torch.distributed's own launcher."""

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
        rank: the failed rank.
        kind: class name of the error that the rank raised; empty if it raised none.
        reason: the error's message, or a description of how the process ended.
    """

    def __init__(self, rank: int, failure: ProcessFailure) -> None:
        self.rank = rank
        self.kind, self.reason = "", f"ended with exit code {failure.exitcode}"
        shown = self.reason
        # The launcher declares the message as a string, but sets a dictionary if the rank raised an
        # error.
        message: Any = failure.message
        if failure.exitcode < 0:
            self.reason = shown = f"was ended by {failure.signal_name()}"
        elif isinstance(message, dict):
            self.kind, _, self.reason = message["message"].partition(": ")
            shown = f"failed\n{message['extraInfo']['py_callstack'].rstrip()}"
        super().__init__(f"rank {rank} {shown}")


def run_on_ranks(world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
    """Call ``function(*arguments)`` in new processes, with the environment that torchrun sets.

    If one process fails, the others are terminated. Ctrl-C and SIGTERM terminate all processes.

    Args:
        world_size: number of processes.
        function: a module-level function, so that it can be pickled. It must first call
            `start_rank`.
        arguments: arguments of the function, which must be picklable.

    Raises:
        RankError: a rank has failed.
        KeyboardInterrupt: after Ctrl-C.
        SystemExit: after another signal to terminate.
    """
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as undo:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            # Restore the signal handlers at the end, since the launcher replaces them.
            undo.callback(signal.signal, number, signal.getsignal(number))
        undo.enter_context(_interrupts_held_back())
        undo.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # the launcher would log errors that we report
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=world_size,
            run_id=uuid.uuid4().hex,
            # Use any free port, like torchrun --standalone.
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
    """Return the rank that raised first and its failure, given the rank that ended first.

    A rank that raises an error closes its connections. As a result, other ranks may fail, too, and
    end before it.
    """
    if not isinstance(failure.message, dict):  # the rank was killed and raised nothing
        return rank, failure
    files = Path(folder).rglob(Path(failure.error_file).name)
    first = min(files, key=lambda file: file.stat().st_mtime_ns)
    of_first = int(first.parent.name)
    return of_first, ProcessFailure(of_first, failure.pid, failure.exitcode, str(first))


def start_rank() -> None:
    """Make Ctrl-C terminate this process at once.

    A KeyboardInterrupt is not enough: a rank never raises it while it waits for another rank.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Block SIGINT in processes started in this context, until they call `start_rank`.

    A terminal sends the signal to all processes, and a process that is still importing modules
    would print a traceback. The parent process still receives the signal: another thread accepts
    it, and Python handles it in the main thread.
    """
    # Start multiprocessing's resource tracker now. It would otherwise start with the first process
    # and unblock SIGINT.
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
