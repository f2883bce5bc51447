"""Saving while training goes on, by a thread that writes a copy."""

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
from .manifest import write_small
from .save import CheckpointWriter, checked_step
from .snapshot import Copies, Optimizers, Stateful
from .task import Task

# Seconds between two looks at what other ranks have written.
_LOOK = 0.02
# Niceness of the thread that writes, added to the process's: on a busy core it gets a tenth.
_NICE = 10


class Background:
    """A checkpoint that is written while training goes on; what `async_save` returns.

    Several ranks call `wait` together. Python waits for the thread before it ends; a process that
    is killed leaves the checkpoint unwritten, and what was there before as it was.

    Attributes:
        waited: whether the caller has been told what has come of it, by `wait` or an error before.
    """

    def __init__(self, writing: CheckpointWriter, copies: Copies | None = None) -> None:
        self._writing = writing
        self._copies = Copies() if copies is None else copies
        self._error: CheckpointError | None = None
        self._task = Task(self._write, "sparsekit save")
        self.waited = False

    def begin(self) -> None:
        """Copy, and start to write; a collective.

        Raises:
            CheckpointError: the draft cannot be made, or there is no memory for the copy.
        """
        writing = self._writing
        try:
            writing.begin()
            writing.together.do(f"copy for {writing.draft.target}", self._copy)
            self._task.start()
        except BaseException as error:
            if self.lost():
                if not isinstance(error, Exception):  # which the other ranks do not know of
                    self._fail("was interrupted before it had begun")
                writing.end()
                self.waited = True
            raise

    def lost(self) -> bool:
        """Whether `begin` was left early and nothing is being written, nor ever will be."""
        return self._task.cancel()

    def done(self) -> bool:
        """Whether this rank's part is written, or has failed; no collective."""
        return self._task.done()

    def wait(self) -> Path:
        """Wait until the checkpoint has appeared; a collective.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written on some rank; what was there before still is.
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
            writing.end()  # on rank 0 after all have written, if it failed
        self.waited = True
        writing.tell()
        return target

    def _copy(self) -> None:
        try:
            self._writing.snapshot.copy_to(self._copies)
        except RuntimeError as error:  # torch's, of an allocation too
            raise CheckpointError(
                f"{self._writing.draft.target}: not saved: the tables cannot be copied: "
                f"{str(error).splitlines()[0]}; save() needs no copy"
            ) from error

    def _write(self) -> None:
        writing = self._writing
        with contextlib.suppress(OSError):  # the thread's own, on Linux: training goes first
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
        """Keep an error for `wait`, and tell rank 0."""
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
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile, so that rank writes
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
    """Like `save`, but written by a thread of its own while training goes on.

    The checkpoint is of this moment: tables and states are copied to memory of the host, as much as
    they take, before the call returns. `Checkpoints.async_save` keeps that memory from one save to
    the next, for which the call is quicker.

    Returns:
        A `Background`, which tells when it is done; all ranks call ``wait()`` on it before they
        save again.
    """
    target = Path(path).absolute()
    writing = CheckpointWriter(module, target, optimizer, state, checked_step(step), process_group)
    background = Background(writing)
    background.begin()
    return background
