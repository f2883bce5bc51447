"""A folder of checkpoints: one after each so many steps, the newest of which are kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from ..errors import check_int
from .background import Background
from .folder import latest, lock_folder, retain, step_folder, unlock_folder
from .load import Loaded, load
from .save import Changes, Writing
from .snapshot import Copies, Optimizers, Stateful, unwrapped
from .together import Together


class Checkpoints:
    """Saves into a folder, ``step-000000000100`` and so on, and loads the latest.

    One job at a time writes into a folder. What a killed one has left is removed at the next save.

    Args:
        folder: made if need be; on a disk that all ranks share.
        keep: how many of the newest stay; what they follow stays as well.
        complete_every: one in so many has all rows, those between only the rows that have changed
            since the one before. 1: all are complete.
        process_group: whose ranks save; None is the default group.

    Raises:
        TypeError, ValueError: a number that is no whole one >= 1.
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
        self._changes = Changes() if self.complete_every > 1 else None
        self._copies = Copies()
        self._saved = 0  # since the last complete one
        self._background: Background | None = None

    def latest(self) -> Path | None:
        """The newest whole checkpoint, or None; no collective. See `latest`."""
        return latest(self.folder)

    def save(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
    ) -> Path:
        """Save as `sparsekit.checkpoint.save` does; a checkpoint of this step is replaced.

        Args:
            step: >= 0, which names the folder.
            module: as there.
            optimizer: as there.
            state: as there.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: as there; or another job writes into this folder; or the last save in
                the background has failed.
        """
        writing = self._writing(step, module, optimizer, state)
        try:
            writing.now()
        except BaseException:
            self._settle(writing, False)
            raise
        self._settle(writing, True)
        return writing.draft.target

    def async_save(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
    ) -> Background:
        """`save` in the background; the one before is waited for. See `async_save`.

        The memory for copies of tables is kept until `close`.
        """
        writing = self._writing(step, module, optimizer, state)
        self._background = Background(
            writing, self._copies, lambda done: self._settle(writing, done)
        )
        return self._background

    def wait(self) -> None:
        """Wait for what is saved in the background, if there is something; a collective."""
        # Kept until then: an interrupted wait can be made again.
        if self._background is not None and not self._background.waited:
            self._background.wait()
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
        """Load the latest whole checkpoint, if there is one; see `sparsekit.checkpoint.load`."""
        self.wait()
        together = Together(unwrapped(module), self._group)
        found = together.text_of_first("the latest", lambda: os.fspath(self.latest() or ""))
        if not found:
            return None
        return load(
            module, found, optimizer, state=state, strict=strict, cast=cast,
            process_group=self._group,
        )  # fmt: skip

    def _writing(
        self,
        step: int,
        module: torch.nn.Module,
        optimizer: Optimizers,
        state: Mapping[str, Stateful] | None,
    ) -> Writing:
        check_int("Checkpoints", "step", step, 0, 10**18)
        self.wait()
        together = Together(unwrapped(module), self._group)
        together.on_first(f"save into {self.folder}", lambda: lock_folder(self.folder))
        target = self.folder / step_folder(step)
        incremental = self._changes is not None and self._saved % self.complete_every != 0
        base = None if self._changes is None else self._changes.base
        if base is not None and base.folder == target.name:
            incremental = False  # it would follow itself
        return Writing(
            module, target, optimizer, state, step, self._group,
            replace=True, changes=self._changes, incremental=incremental,
        )  # fmt: skip

    def _settle(self, writing: Writing, done: bool) -> None:
        self._saved = self._saved + 1 if done else 0
        if self._changes is not None:
            self._changes.settle(writing.base_of_next if done else None)
        if done and writing.together.rank == 0:
            retain(self.folder, self.keep)

    def close(self) -> None:
        """Let other jobs write into the folder; what is saved in the background is waited for."""
        self.wait()
        self._copies = Copies()
        unlock_folder(self.folder)
