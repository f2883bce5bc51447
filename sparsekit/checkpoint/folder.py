"""Finds the latest checkpoint in a folder, follows chains, and removes old checkpoints."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from ..errors import CheckpointError
from .draft import entries, recover, remove
from .files import size_of
from .manifest import MANIFEST, Manifest
from .manifest_file import read_manifest

_STEP = re.compile(r"step-(\d{12,19})\Z")


def step_folder(step: int) -> str:
    """Return the name of the folder for a step's checkpoint."""
    return f"step-{step:012d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """Return a folder's checkpoint paths by step, in ascending order; some may be damaged."""
    found = {
        int(match[1]): path
        for path in entries(folder)
        if (match := _STEP.match(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Find the newest whole checkpoint in a folder; return None if there is none.

    A checkpoint that has lost files, or whose base is gone, is skipped with a warning. Only the
    sizes of files are checked; `load` checks their contents.

    Args:
        folder: folder that `Checkpoints` writes to.
    """
    folder = Path(folder)
    recover(folder)
    for path in reversed(steps_in(folder).values()):
        try:
            whole_chain(path)
        except CheckpointError as error:
            warnings.warn(f"sparsekit: {path} is passed over: {error}", stacklevel=2)
            continue
        return path
    return None


def resolved(path: str | os.PathLike[str]) -> Path:
    """Return a checkpoint's path unchanged; for a folder of checkpoints, the path of the latest.

    Raises:
        CheckpointError: there is no checkpoint.
    """
    path = Path(path)
    recover(path)
    if (path / MANIFEST).exists() or not steps_in(path):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path}: none of the checkpoints in it is whole")
    return found


def chain(path: Path) -> list[tuple[Path, Manifest]]:
    """List the checkpoints of a chain with their manifests, from the complete one to ``path``.

    Raises:
        CheckpointError: a checkpoint is missing or damaged, or is not the base that the next one
            names.
    """
    links = [(path, read_manifest(path))]
    seen = {links[0][1].id}
    while (base := links[0][1].base) is not None:
        at, newer = links[0]
        folder = at.parent / base.folder
        if folder.is_symlink() or not folder.is_dir():
            raise CheckpointError(
                f"{at}: has the changes since {base.folder}, which is not beside it: a gap in the "
                f"chain"
            )
        older = read_manifest(folder)
        if older.id != base.id:
            raise CheckpointError(
                f"{at}: has the changes since checkpoint {base.id}, but {base.folder} is "
                f"{older.id}: a wrong order, or another run's"
            )
        if older.id in seen:
            raise CheckpointError(f"{at}: its chain goes round in a circle")
        for name, table in newer.tables.items():
            if not table.complete and name not in older.tables:
                raise CheckpointError(f"{at}: has changes of {name}, which {base.folder} lacks")
        seen.add(older.id)
        links.insert(0, (folder, older))
    return links


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Check that all files of a checkpoint exist and have the right sizes.

    Raises:
        CheckpointError: a file is missing or has the wrong size; the message names the first one.
    """
    for name, written in manifest.files.items():
        if (size := size_of(folder / name)) != written.bytes:
            raise CheckpointError(
                f"{folder / name}: is damaged: it has {size} bytes, and {written.bytes} were "
                f"written"
            )


def whole_chain(path: Path) -> list[tuple[Path, Manifest]]:
    """Check the size of every file in a checkpoint's `chain`, and return the chain.

    Raises:
        CheckpointError: a file in the chain is missing or has the wrong size.
    """
    links = chain(path)
    for folder, manifest in links:
        check_sizes(folder, manifest)
    return links


def retain(folder: Path, keep: int, written: Path) -> list[str]:
    """Remove old checkpoints: keep the newest ``keep`` whole ones, ``written``, and their bases.

    If a checkpoint to keep is damaged, its base is unknown, so nothing is removed.

    Returns:
        Warnings for the user about checkpoints that prevent the removal of others.
    """
    found = list(steps_in(folder).values())
    whole: list[Path] = []
    broken: list[str] = []
    needed: set[Path] = set()
    for path in reversed(found):
        if len(whole) < keep or path == written:
            try:
                needed |= {each for each, _ in whole_chain(path)}
                whole.append(path)
            except CheckpointError as error:
                broken.append(f"sparsekit: nothing is removed from {folder} meanwhile: {error}")
    if not broken:
        for path in found:
            if path not in needed:
                remove(path)
    if whole and written in found and whole[0] != written:
        broken.append(
            f"sparsekit: {written} was saved, but {whole[0].name} is there too and stays the "
            f"latest, from which a run goes on; remove it if it is not wanted"
        )
    return broken
