"""Saving while training goes on, by a thread that writes a copy."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..distributed.world import settings
from ..errors import CheckpointError
from .manifest import write_small
from .save import Writing
from .snapshot import Copies, Optimizers, Stateful

# Seconds between two looks at what other ranks have written.
_LOOK = 0.02
# Of the thread that writes, added to the process's: on a busy core it gets a tenth.
_NICE = 10


class Background:
    """A checkpoint that is written while training goes on; what `async_save` returns.

    Several ranks call `wait` together. Python waits for the thread before it ends; a process that
    is killed leaves the checkpoint unwritten, and what was there before as it was.

    Attributes:
        waited: whether `wait` has been called.
    """

    def __init__(
        self,
        writing: Writing,
        copies: Copies | None = None,
        after: Callable[[bool], None] | None = None,
    ) -> None:
        self._writing = writing
        self._after = after
        self._error: CheckpointError | None = None
        self.waited = False
        try:
            writing.together.do(
                f"copy for {writing.draft.target}", lambda: self._copy(copies or Copies())
            )
        except BaseException:
            self._abandon()
            raise
        self._thread = threading.Thread(target=self._write, name="sparsekit save")
        self._thread.start()

    def done(self) -> bool:
        """Whether this rank's part is written, or has failed; no collective."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint has appeared; a collective.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written on some rank; what was there before still is.
        """
        self._thread.join()
        self.waited = True
        after, self._after = self._after, None

        def answer() -> Path:
            if self._error is not None:
                raise self._error
            return self._writing.draft.target

        try:
            target = self._writing.together.do("wait for a save", answer)
        except BaseException:
            self._abandon()
            if after is not None:
                after(False)
            raise
        finally:
            self._writing.draft.close()
        if after is not None:
            after(True)
        return target

    def _copy(self, copies: Copies) -> None:
        try:
            self._writing.snapshot.copy_to(copies)
        except RuntimeError as error:  # torch's, of an allocation too
            raise CheckpointError(
                f"{self._writing.draft.target}: not saved: the tables cannot be copied: "
                f"{str(error).splitlines()[0]}; save() needs no copy"
            ) from error

    def _abandon(self) -> None:
        if self._writing.together.rank == 0:
            self._writing.draft.abandon()

    def _write(self) -> None:
        writing = self._writing
        with contextlib.suppress(OSError):  # the thread's own, on Linux: training goes first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.nice(0) + _NICE)
        try:
            writing.write_own()
            if writing.together.rank == 0:
                _wait_for_others(writing)
                writing.publish()
            return
        except CheckpointError as error:
            text = str(error)
        except BaseException:
            text = traceback.format_exc(limit=-3)
        self._error = CheckpointError(f"{writing.draft.target}: not saved: {text}")
        with contextlib.suppress(OSError, CheckpointError):
            name = f"rank-{writing.together.rank:04d}.failed"
            write_small(writing.draft.folder / name, text.encode())


def _wait_for_others(writing: Writing) -> None:
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
            with contextlib.suppress(FileNotFoundError):  # renamed meanwhile, so somebody writes
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
        What tells when it is done; all ranks call ``wait()`` on it, before they save again.
    """
    target = Path(path).absolute()
    return Background(Writing(module, target, optimizer, state, step, process_group))
