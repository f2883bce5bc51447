"""Manages a folder of checkpoints, and keeps only the newest ones."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import CheckpointError, check_int
from .background import Background
from .changes import Marks
from .copies import Copies
from .draft import make_folder
from .folder import latest, step_folder, steps_in, whole_chain
from .load import Loaded, load
from .lock import Lock, lock_folder
from .save import CheckpointWriter
from .snapshot import Optimizers, Stateful, unwrapped
from .together import Together


class Checkpoints:
    """Saves checkpoints into a folder, as ``step-000000000100`` and so on, and loads the latest.

    Only one job at a time can write to a folder: from its first save until `close`, or until this
    object is garbage-collected. The next save removes the leftovers of a killed job. The first save
    of a run raises an error if the folder already has checkpoints for the same step or a later one,
    since `latest` would find them instead of the new one. See `claim`.

    Args:
        folder: created if it is missing; must be on a disk that all ranks share.
        keep: how many of the newest checkpoints to keep. Checkpoints that they build on are kept,
            too.
        complete_every: interval, in checkpoints, between complete ones. The others are incremental:
            they contain only rows changed since the previous checkpoint. With 1, all are complete.
        process_group: process group of the ranks that save; None is the default group.

    Raises:
        TypeError, ValueError: keep or complete_every is not an integer >= 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        complete_every: int = 1,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        self.keep = check_int("Checkpoints", "keep", keep, 1, 2**31 - 1)
        self.complete_every = check_int(
            "Checkpoints", "complete_every", complete_every, 1, 2**31 - 1
        )
        self._group = process_group
        self._marks: Marks | None = None  # marks of the last save that began, even if it failed
        self._copies = Copies()
        self._background: Background | None = None
        self._lock: Lock | None = None
        self._claimed = False

    def latest(self) -> Path | None:
        """Return the newest whole checkpoint, or None. Not a collective."""
        return latest(self.folder)

    def save(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
    ) -> Path:
        """Save as `sparsekit.checkpoint.save` does, into a folder named after the step.

        The step must be >= 0. An existing checkpoint for this step is replaced.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: as for `sparsekit.checkpoint.save`; or another job is writing to this
                folder; or the last background save has failed.
        """
        writing = self._writing(step, module, optimizer, state)
        writing.now()
        return writing.draft.target

    def async_save(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
    ) -> Background:
        """Wait for the previous save, then save as `sparsekit.checkpoint.async_save` does.

        All saves copy the tables into the same block of memory, which `close` frees.
        """
        background = Background(self._writing(step, module, optimizer, state), self._copies)
        # Store the save before it begins, so that `wait` finds it even if `begin` is interrupted.
        self._background = background
        background.begin()
        return background

    def wait(self) -> None:
        """Wait for the background save to finish, if there is one (a collective call)."""
        # Clear `_background` only at the end, so that an interrupted wait can be repeated.
        background = self._background
        if background is not None and not background.waited and not background.lost():
            background.wait()
        self._background = None

    def load(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
        strict: bool = True,
        cast: bool = False,
    ) -> Loaded | None:
        """Load the latest whole checkpoint; return None if there is none.

        See `sparsekit.checkpoint.load` for the arguments.
        """
        self.wait()
        together = Together(unwrapped(module), self._group)
        found = together.text_of_first("the latest", lambda: os.fspath(self.latest() or ""))
        if not found:
            return None
        loaded = load(
            module, found, optimizer, state=state, strict=strict, cast=cast,
            process_group=self._group,
        )  # fmt: skip
        self._claimed = True
        return loaded

    def claim(self, step: int, module: torch.nn.Module) -> None:
        """Claim the folder for a run that starts saving at this step or later (a collective call).

        The first save also claims the folder. Call this method to learn at the start of a long run
        whether the folder can be used.

        Args:
            step: earliest step that will be saved, >= 0.
            module: the module that will be saved.

        Raises:
            CheckpointError: another job is writing to this folder, or this process cannot write to
                it; or the folder has whole checkpoints for this step or a later one. After this
                object has loaded from the folder or claimed it, such checkpoints are accepted until
                `close`.
        """
        together = Together(unwrapped(module), self._group)

        def take() -> None:
            make_folder(self.folder)
            self._lock = lock_folder(self.folder)
            if not self._claimed:
                _refuse_older_run(self.folder, step)

        together.on_first(f"save into {self.folder}", take)
        self._claimed = True

    def _writing(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers,
        state: Mapping[str, Stateful] | None,
    ) -> CheckpointWriter:
        check_int("Checkpoints", "step", step, 0, 10**18)
        self.wait()
        self.claim(step, module)
        target = self.folder / step_folder(step)
        writing = CheckpointWriter(
            module, target, optimizer, state, step, self._group, self.keep,
            marked=self.complete_every > 1, follows=self._follows(target, module),
        )  # fmt: skip
        # This save overwrites the previous save's marks, whether or not it succeeds.
        self._marks = writing.marks
        return writing

    def _follows(self, target: Path, module: torch.nn.Module) -> Marks | None:
        """Return the last checkpoint's marks if the next one can build on it, else None."""
        marks = self._marks

        def of_base() -> str:
            if marks is None or marks.links + 1 >= self.complete_every:
                return ""
            try:
                links = whole_chain(self.folder / marks.base.folder)
            except CheckpointError:
                return ""
            if links[-1][1].id != marks.base.id or target in [folder for folder, _ in links]:
                return ""
            if any(manifest.forgotten for _, manifest in links):
                return ""  # the marks may describe rows that were removed
            return marks.base.id

        if self.complete_every == 1:
            return None
        together = Together(unwrapped(module), self._group)
        base = together.text_of_first("what to follow", of_base)
        return marks if marks is not None and marks.base.id == base else None

    def close(self) -> None:
        """Wait for the background save to finish, then let other jobs write to the folder."""
        self.wait()
        self._copies = Copies()
        self._claimed = False
        self._lock = None


def _refuse_older_run(folder: Path, step: int) -> None:
    later = []
    for number, path in steps_in(folder).items():
        if number >= step:
            with contextlib.suppress(CheckpointError):
                whole_chain(path)
                later.append(path.name)
    if later:
        raise CheckpointError(
            f"{folder}: has checkpoints of another run, up to {later[-1]}, and the first of this "
            f"one is of step {step}: go on from them (Checkpoints.load, or fit(resume=True)), name "
            f"another folder, or remove them"
        )
