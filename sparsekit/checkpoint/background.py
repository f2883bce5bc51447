"""Saving while training goes on, by a process that has the memory as it was."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..distributed.world import settings
from ..errors import CheckpointError
from .manifest import write_small
from .save import Writing
from .snapshot import Optimizers, Stateful

# Seconds between two looks at what other ranks have written.
_LOOK = 0.02


class Background:
    """A checkpoint that is written while training goes on; what `async_save` returns.

    Several ranks call `wait` together.

    Attributes:
        waited: whether `wait` has been called.
    """

    def __init__(self, writing: Writing, after: Callable[[bool], None] | None = None) -> None:
        self._writing = writing
        self._after = after
        self._error: BaseException | None = None
        self._ended = self.waited = False
        writing.together.do(f"copy for {writing.draft.target}", writing.snapshot.to_host)
        self._read, theirs = os.pipe()
        # The child has the memory as it is now: pages that training writes to are copied first.
        gc.disable()  # what it frees in the child would be copied
        try:
            with warnings.catch_warnings():
                # Python warns of forks beside threads; this one takes no lock that they may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process = os.fork()
        finally:
            gc.enable()
        if self._process == 0:
            os.close(self._read)
            _write_in_child(writing, theirs)
        os.close(theirs)

    def done(self) -> bool:
        """Whether this rank's part is written, or has failed; no collective."""
        if not self._ended:
            process, _ = os.waitpid(self._process, os.WNOHANG)
            if process:
                self._finish()
        return self._ended

    def _finish(self) -> None:
        self._ended = True
        with os.fdopen(self._read, "rb") as answer:
            text = answer.read().decode(errors="replace")
        if text != "done":
            reason = text or "the process that wrote it was killed"
            target = self._writing.draft.target
            self._error = CheckpointError(f"{target}: not saved: {reason}")

    def wait(self) -> Path:
        """Wait until the checkpoint has appeared; a collective.

        Returns:
            Its folder.

        Raises:
            CheckpointError: it could not be written on some rank; what was there before still is.
        """
        self.waited = True
        if not self._ended:
            os.waitpid(self._process, 0)
            self._finish()
        after, self._after = self._after, None

        def answer() -> Path:
            if self._error is not None:
                raise self._error
            return self._writing.draft.target

        try:
            target = self._writing.together.do("wait for a save", answer)
        except BaseException:
            if self._writing.together.rank == 0:
                self._writing.draft.abandon()
            if after is not None:
                after(False)
            raise
        finally:
            self._writing.draft.close()
        if after is not None:
            after(True)
        return target


def _write_in_child(writing: Writing, answer: int) -> None:
    """What a forked process does; it ends here, without Python's usual way out.

    It computes with NumPy alone: threads of torch are missing here.
    """
    status = 1
    try:
        parent = os.getppid()
        text = "done"
        try:
            os.nice(5)  # training goes first
            writing.write_own()
            if writing.together.rank == 0:
                _wait_for_others(writing, parent)
                writing.publish()
            status = 0
        except CheckpointError as error:
            text = str(error)
        except BaseException:
            text = traceback.format_exc(limit=-3)
        if text != "done":
            with contextlib.suppress(OSError, CheckpointError):
                name = f"rank-{writing.together.rank:04d}.failed"
                write_small(writing.draft.folder / name, text.encode())
        with contextlib.suppress(OSError):
            os.write(answer, text.encode()[:60000])
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait_for_others(writing: Writing, parent: int) -> None:
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
            if os.getppid() != parent:
                raise CheckpointError("the job has ended before all ranks had written")
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
    """Like `save`, but written by a process of its own while training goes on.

    The checkpoint is of this moment. On the CPU nothing is copied but what training changes
    meanwhile (a fork has the memory as it was); tables on a GPU are copied to the host first.

    Returns:
        What tells when it is done; all ranks call ``wait()`` on it, before they save again.
    """
    target = Path(path).absolute()
    return Background(Writing(module, target, optimizer, state, step, process_group))
