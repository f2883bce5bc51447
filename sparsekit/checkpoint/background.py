"""Saves a copy of the model in a background thread while training continues."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..distributed.world import settings
from ..errors import CheckpointError
from .copies import Copies
from .files import write_small
from .save import CheckpointWriter
from .snapshot import Optimizers, Stateful
from .task import Task

# Interval in seconds between rank 0's checks for files that the other ranks have yet to write.
_LOOK = 0.02
# Niceness of the writing thread: on a busy core, the thread gets about a tenth of the CPU time.
_NICE = 10


class Background:
    """A checkpoint that is being written in the background; returned by `async_save`.

    All ranks must call `wait` together. Before exiting, Python waits for the thread. If the process
    is killed, no new checkpoint appears and older ones stay as they were.

    Attributes:
        waited: whether `wait` has returned, or has raised the error of a failed save.
    """

    def __init__(self, writing: CheckpointWriter, copies: Copies | None = None) -> None:
        self._writing = writing
        self._copies = Copies() if copies is None else copies
        self._error: CheckpointError | None = None
        self._task = Task(self._write, "sparsekit save")
        self.waited = False

    def begin(self) -> None:
        """Copy the tables and start writing (a collective call).

        Raises:
            CheckpointError: the draft cannot be created, or there is not enough memory for the
                copy.
        """
        writing = self._writing
        try:
            writing.begin()
            writing.together.do(f"copy for {writing.draft.target}", self._copy)
            self._task.start()
        except BaseException as error:
            if self.lost():
                # Only this rank was interrupted: report it to the others.
                if not isinstance(error, Exception):
                    self._fail("was interrupted before it had begun")
                writing.end()
            raise

    def lost(self) -> bool:
        """Return whether `begin` was interrupted; if so, make sure that nothing is written."""
        return self._task.cancel()

    def done(self) -> bool:
        """Return whether this rank has written its part, or has failed to; not a collective."""
        return self._task.done()

    def wait(self) -> Path:
        """Wait until the checkpoint is complete and visible (a collective call).

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: a rank could not write the checkpoint; older checkpoints are unchanged.
        """
        self._task.wait()
        writing = self._writing

        def answer() -> Path:
            if self._error is not None:
                raise self._error
            return writing.draft.target

        try:
            target = writing.together.do("wait for a save", answer)
        except Exception:
            self.waited = True
            raise
        finally:
            writing.end()  # if a rank failed, rank 0 removes the draft once all ranks are done
        self.waited = True
        writing.tell()
        return target

    def _copy(self) -> None:
        try:
            self._writing.snapshot.copy_to(self._copies)
        except RuntimeError as error:  # torch raises RuntimeError when memory runs out
            raise CheckpointError(
                f"{self._writing.draft.target}: not saved: the tables cannot be copied: "
                f"{str(error).splitlines()[0]}; save() needs no copy"
            ) from error

    def _write(self) -> None:
        writing = self._writing
        # On Linux, this lowers the priority of this thread only, in favor of training.
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        try:
            writing.write_own()
            if writing.together.rank == 0:
                _wait_for_others(writing)
                writing.publish()
        except CheckpointError as error:
            self._fail(str(error))
        except BaseException:
            self._fail(traceback.format_exc(limit=-3))
        finally:
            writing.end()

    def _fail(self, text: str) -> None:
        """Store an error for `wait` to raise, and report it to rank 0."""
        writing = self._writing
        self._error = CheckpointError(f"{writing.draft.target}: not saved: {text}")
        with contextlib.suppress(OSError, CheckpointError):
            name = f"rank-{writing.together.rank:04d}.failed"
            write_small(writing.draft.folder / name, text.encode(errors="backslashreplace"))


def _wait_for_others(writing: CheckpointWriter) -> None:
    folder, world_size = writing.draft.folder, writing.together.world_size
    missing = set(range(world_size))
    patience, grown, size = settings.timeout.total_seconds(), time.monotonic(), -1
    while missing:
        missing = {rank for rank in missing if not (folder / f"rank-{rank:04d}.part").exists()}
        for rank in missing:
            failed = folder / f"rank-{rank:04d}.failed"
            if failed.exists():
                raise CheckpointError(f"rank {rank}: {failed.read_text()}")
        if missing:
            with contextlib.suppress(FileNotFoundError):  # already renamed by rank 0
                if size != (size := sum(file.stat().st_size for file in folder.iterdir())):
                    grown = time.monotonic()
            if time.monotonic() - grown > patience:
                raise CheckpointError(
                    f"ranks {sorted(missing)} have written nothing for {patience:g} s"
                )
            time.sleep(_LOOK)


def async_save(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizers = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    step: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Background:
    """Save as `save` does, but write in a background thread while training continues.

    Saves the state at the time of the call: before the call returns, tables and states are copied
    to host memory, which must have room for all of them. `Checkpoints.async_save` is quicker, since
    it reuses that memory from one save to the next.

    Returns:
        A `Background`; all ranks call ``wait()`` on it before they save again.
    """
    target = Path(path).absolute()
    writing = CheckpointWriter(module, target, optimizer, state, step, process_group)
    background = Background(writing)
    background.begin()
    return background
