"""Folders of checkpoints: how one appears all at once, which is the latest, which may go."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from ..errors import CheckpointError
from .manifest import MANIFEST, Manifest, new_id
from .manifest_file import read_manifest
from .tensor_file import check_sum, open_plain

_STEP = re.compile(r"step-(\d{12,19})\Z")
# In a folder that is being written, for as long as somebody writes.
_WRITER = ".writer"
_LOCK = ".lock"
# A chain that is longer has gone round in a circle.
_LONGEST_CHAIN = 100_000


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint."""
    return f"step-{step:012d}"


def steps_in(folder: Path) -> dict[int, Path]:
    """Checkpoints in a folder by step, rising; they may be damaged."""
    found = {
        int(match[1]): path
        for path in _entries(folder)
        if (match := _STEP.match(path.name)) and path.is_dir()
    }
    return dict(sorted(found.items()))


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error.strerror or error}") from error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest whole checkpoint in a folder; None if there is none.

    One that has lost files, or whose base is gone, is passed over with a warning. What files hold
    is not looked at; `load` does that.

    Args:
        folder: as `Checkpoints` has filled it.
    """
    for path in reversed(steps_in(Path(folder)).values()):
        try:
            for each, manifest in chain(path):
                check_files(each, manifest, contents=False)
        except CheckpointError as error:
            warnings.warn(f"sparsekit: {path} is passed over: {error}", stacklevel=2)
            continue
        return path
    return None


def resolved(path: str | os.PathLike[str]) -> Path:
    """A checkpoint, given it or a folder of them, of which it is the latest.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).exists() or not steps_in(path):
        return path
    found = latest(path)
    if found is None:
        raise CheckpointError(f"{path}: none of the checkpoints in it is whole")
    return found


def chain(path: Path) -> list[tuple[Path, Manifest]]:
    """A checkpoint and those it follows, the complete one first.

    Raises:
        CheckpointError: one is missing, damaged, or not the one that the next one follows.
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
        if older.id in seen or len(links) > _LONGEST_CHAIN:
            raise CheckpointError(f"{at}: its chain goes round in a circle")
        for name, table in newer.tables.items():
            if not table.complete and name not in older.tables:
                raise CheckpointError(f"{at}: has changes of {name}, which {base.folder} lacks")
        seen.add(older.id)
        links.insert(0, (folder, older))
    return links


def check_files(folder: Path, manifest: Manifest, contents: bool = True) -> None:
    """Check that the files of a checkpoint are there and whole.

    Args:
        folder: where.
        manifest: of the folder.
        contents: whether to read them all, or look at sizes only.

    Raises:
        CheckpointError: naming the first file that is not.
    """
    for name, written in manifest.files.items():
        if contents:
            check_sum(folder / name, written)
            continue
        file = open_plain(folder / name)
        size = os.fstat(file).st_size
        os.close(file)
        if size != written.bytes:
            raise CheckpointError(
                f"{folder / name}: is damaged: it has {size} bytes, and {written.bytes} were "
                f"written"
            )


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and have that reach the disk."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be made: {error.strerror or error}") from error


class Draft:
    """A folder in which a checkpoint is written, beside the place where it will appear.

    Args:
        target: that place.
        id: of the checkpoint.
    """

    def __init__(self, target: Path, id: str) -> None:
        self.target = target
        self.id = id
        self.folder = target.parent / f".{target.name}.part-{id}"
        self._lock: int | None = None

    def begin(self, replace: bool) -> None:
        """Make the folder.

        Raises:
            CheckpointError: there is a checkpoint already, unless it may be replaced; or the folder
                cannot be made.
        """
        make_folder(self.target.parent)
        if not replace and os.path.lexists(self.target):
            raise CheckpointError(
                f"{self.target}: there is something already, and a checkpoint does not replace "
                f"it; name another folder, or let sparsekit.checkpoint.Checkpoints name them"
            )
        remove_abandoned(self.target.parent)
        try:
            self.folder.mkdir()
            self._lock = os.open(self.folder / _WRITER, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.abandon()
            raise CheckpointError(
                f"{self.folder}: cannot be made: {error.strerror or error}"
            ) from error

    def publish(self) -> None:
        """Have the folder appear in its place, which it does whole or not at all."""
        try:
            for note in filter(_is_note, _entries(self.folder)):
                note.unlink(missing_ok=True)
            sync_folder(self.folder)
            old = None
            if os.path.lexists(self.target):
                old = _aside(self.target)
            try:
                os.rename(self.folder, self.target)
            except OSError:
                if old is not None:
                    os.rename(old, self.target)
                raise
            # Not before: a draft without it would be taken for abandoned.
            (self.target / _WRITER).unlink(missing_ok=True)
            sync_folder(self.target.parent)
        except OSError as error:
            raise CheckpointError(
                f"{self.target}: cannot be published: {error.strerror or error}"
            ) from error
        self.close()
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Let go of the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def abandon(self) -> None:
        """Remove what was written so far."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.close()


@contextlib.contextmanager
def published(target: str | os.PathLike[str]) -> Iterator[Draft]:
    """A draft to write to, which appears at target at the end; an error removes it.

    Raises:
        CheckpointError: there is something at target already, or it cannot be made.
    """
    draft = Draft(Path(target).absolute(), new_id())
    draft.begin(replace=False)
    try:
        yield draft
        draft.publish()
    except BaseException:
        draft.abandon()
        raise


def _is_note(path: Path) -> bool:
    """Whether a file is what a rank has told the one that publishes."""
    return path.suffix in (".part", ".failed")


def _aside(path: Path) -> Path:
    old = path.parent / f".{path.name}.old-{secrets.token_hex(8)}"
    os.rename(path, old)
    return old


def remove(path: Path) -> None:
    """Remove a checkpoint, which disappears at once even if its files do so one by one."""
    with contextlib.suppress(OSError):
        shutil.rmtree(_aside(path), ignore_errors=True)


def remove_abandoned(folder: Path) -> None:
    """Remove what writers have left that are no more."""
    for path in _entries(folder):
        removed = re.fullmatch(r"\..+\.old-[0-9a-f]{16}", path.name)
        draft = re.fullmatch(r"\..+\.part-[0-9a-f]{32}", path.name)
        if removed or (draft and _is_abandoned(path)):
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(draft: Path) -> bool:
    try:
        file = os.open(draft / _WRITER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def sync_folder(path: Path) -> None:
    """Have the names in a folder reach the disk."""
    file = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


# Files by which this process keeps other jobs out of folders.
_locks: dict[Path, int] = {}


def _let_go_in_child() -> None:
    # A worker of a DataLoader may outlive this process.
    for file in _locks.values():
        os.close(file)
    _locks.clear()


os.register_at_fork(after_in_child=_let_go_in_child)


def lock_folder(folder: Path) -> None:
    """Keep other jobs from writing into a folder, until `unlock_folder` or the process ends.

    Raises:
        CheckpointError: another job writes there, or the folder cannot be written.
    """
    make_folder(folder)
    folder = folder.resolve()
    if folder in _locks:
        if (folder / _LOCK).exists():
            return
        unlock_folder(folder)  # the folder was removed and made again
    path = folder / _LOCK
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.pread(file, 200, 0).decode(errors="replace").strip()
        os.close(file)
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise CheckpointError(f"{path}: cannot be locked: {error.strerror or error}") from error
        raise CheckpointError(
            f"{folder}: another job writes checkpoints there ({owner or 'unknown'}); give each "
            f"job a folder of its own"
        ) from None
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    _locks[folder] = file


def unlock_folder(folder: Path) -> None:
    """Let other jobs write into a folder."""
    file = _locks.pop(folder.resolve(), None)
    if file is not None:
        os.close(file)


def retain(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints and those that they follow."""
    newest = list(steps_in(folder).values())
    needed: set[Path] = set()
    for path in newest[-keep:]:
        try:
            needed |= {each for each, _ in chain(path)}
        except CheckpointError:
            needed.add(path)  # nobody knows what it would need
            return
    for path in newest[:-keep]:
        if path not in needed:
            remove(path)
