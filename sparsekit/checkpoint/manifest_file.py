"""Writes and reads ``manifest.json``, which is checked before it is believed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from .encoding import check_nesting
from .files import FileRecord, naming, plain_file, write_small
from .manifest import (
    CHECKSUM,
    DENSE,
    FORMAT,
    MANIFEST,
    VERSION,
    Base,
    Manifest,
    Shard,
    State,
    Table,
    rank_file,
)

_MOST_BYTES = 256 << 20
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_MOST_ROWS = 2**40
ROW_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
# Column names that no state may have; see docs/checkpoint_format.md.
_OWN_COLUMNS = {"keys", "vectors", "scores", "removed"}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write manifest and checksum, which makes a folder of files a checkpoint.

    Raises:
        CheckpointError: they cannot be written, or `read_manifest` would refuse them.
    """
    path = folder / MANIFEST
    try:
        text = json.dumps(_values_of(manifest), indent=1, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be written: {error}") from error
    if len(text) > _MOST_BYTES:
        raise CheckpointError(
            f"{path}: {len(text)} bytes are too many; it has {_MOST_BYTES} at most"
        )
    _parsed(path, text)  # a checkpoint that cannot be read again must not appear
    for name, content in ((MANIFEST, text), (CHECKSUM, b"%08x\n" % zlib.crc32(text))):
        write_small(folder / name, content)


def _values_of(manifest: Manifest) -> dict[str, Any]:
    values = {"format": FORMAT, "format_version": VERSION, **dataclasses.asdict(manifest)}
    values["files"] = {
        name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"}
        for name, file in manifest.files.items()
    }
    for name, table in manifest.tables.items():
        owners = None if table.owners is None else f"{table.owners:08x}"
        values["tables"][name]["owners"] = owners
    return values


def without_files(path: Path, manifest: Manifest) -> Manifest:
    """Return a manifest for a storage without files, checked as if read from a file.

    Raises:
        CheckpointError: see `read_manifest`.
    """
    text = json.dumps(_values_of(manifest))
    return _Reader(path, files=False).manifest(json.loads(text))


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and check everything in it.

    Raises:
        CheckpointError: it is missing, damaged, malicious or of a newer format.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    if not os.path.lexists(path):
        raise CheckpointError(f"{folder}: is no checkpoint: it has no {MANIFEST}")
    text = _read_small(path, _MOST_BYTES)
    expected = _read_small(folder / CHECKSUM, 64).strip()
    if expected != b"%08x" % zlib.crc32(text):
        raise CheckpointError(
            f"{path}: is damaged: its CRC-32 is {zlib.crc32(text):08x}, and {CHECKSUM} says "
            f"{expected[:8].decode(errors='replace')}"
        )
    return _parsed(path, text)


def _parsed(path: Path, text: bytes) -> Manifest:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is no JSON: {error}") from None
    return _Reader(path).manifest(values)


def _read_small(path: Path, most: int) -> bytes:
    with naming(path, "cannot be read"), plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path}: {size} bytes are too many; it has {most} at most")
        return file.read(most + 1)


class _Reader:
    """Makes a `Manifest` of parsed JSON; errors name the place of the fault.

    Args:
        path: the file, for errors.
        files: whether the files that it names exist.
    """

    def __init__(self, path: Path, files: bool = True) -> None:
        self._path = path
        self._has_files = files
        self._of_tables: set[str] = set()

    def _refuse(self, where: str, expected: str, value: Any) -> CheckpointError:
        return CheckpointError(f"{self._path}: {where} must be {expected}, got {value!r:.80}")

    def _object(self, where: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise self._refuse(where, "an object", value)
        return value

    def _list(self, where: str, value: Any) -> list[Any]:
        if type(value) is not list:
            raise self._refuse(where, "a list", value)
        return value

    def _int(self, where: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            raise self._refuse(where, f"a whole number in [{least}, {most}]", value)
        return value

    def _text(self, where: str, value: Any, most: int = 10_000) -> str:
        if type(value) is not str or len(value) > most:
            raise self._refuse(where, f"a text of at most {most} characters", value)
        return value

    def _hex(self, where: str, value: Any, digits: int) -> str:
        if type(value) is not str or not re.fullmatch(f"[0-9a-f]{{{digits}}}", value):
            raise self._refuse(where, f"{digits} hexadecimal digits", value)
        return value

    def _choice(self, where: str, value: Any, choices: tuple[str, ...]) -> str:
        if type(value) is not str or value not in choices:
            raise self._refuse(where, f"one of {', '.join(choices)}", value)
        return value

    def _bool(self, where: str, value: Any) -> bool:
        if type(value) is not bool:
            raise self._refuse(where, "true or false", value)
        return value

    def _file(self, where: str, value: Any) -> str:
        # Files lie in the folder itself, so that no name can lead out of it.
        if type(value) is not str or not _FILE.match(value):
            raise self._refuse(where, "the name of a file in the folder", value)
        return value

    def manifest(self, values: Any) -> Manifest:
        values = self._object("it", values)
        if values.get("format") != FORMAT:
            raise self._refuse("format", repr(FORMAT), values.get("format"))
        version = self._int("format_version", values.get("format_version"), 1, 2**31)
        if version > VERSION:
            raise CheckpointError(
                f"{self._path}: format_version {version} is newer than {VERSION}, which this "
                f"version of sparsekit reads; sparsekit {values.get('version')!r:.20} wrote it"
            )
        base = values.get("base")
        if base is not None:
            base = self._object("base", base)
            base = Base(
                self._file("base.folder", base.get("folder")),
                self._hex("base.id", base.get("id"), 32),
            )
        step = values.get("step")
        world_size = self._int("world_size", values.get("world_size"), 1, 2**20)
        files = dict(self._files(self._object("files", values.get("files"))))
        tables = self._object("tables", values.get("tables"))
        optimizers = self._list("optimizers", values.get("optimizers"))
        ranks = self._list("ranks", values.get("ranks"))
        if len(ranks) != world_size:
            raise self._refuse("ranks", f"{world_size} entries", f"{len(ranks)} entries")
        if self._has_files:
            for name in (DENSE, *map(rank_file, range(world_size))):
                if name not in files:
                    raise self._refuse("files", f"a list with {name}", sorted(files)[:5])
        read = Manifest(
            id=self._hex("id", values.get("id"), 32),
            step=None if step is None else self._int("step", step, 0, 2**63 - 1),
            base=base,
            world_size=world_size,
            tables={
                self._text("the name of a table", name, 1000): self._table(
                    f"tables[{name!r:.100}]", table, world_size, files, base, len(optimizers)
                )
                for name, table in tables.items()
            },
            files=files,
            optimizers=[
                self._state_of(f"optimizers[{i}]", one) for i, one in enumerate(optimizers)
            ],
            ranks=[self._state_of(f"ranks[{i}]", one) for i, one in enumerate(ranks)],
            version=self._text("version", values.get("version"), 100),
        )
        return read

    def _state_of(self, where: str, value: Any) -> dict[str, Any]:
        value = self._object(where, value)
        try:
            check_nesting(value)
        except CheckpointError as error:
            raise CheckpointError(f"{self._path}: {where}: {error}") from None
        return value

    def _files(self, files: dict[str, Any]) -> Iterator[tuple[str, FileRecord]]:
        for name, value in files.items():
            where = f"files[{name!r:.100}]"
            self._file(where, name)
            value = self._object(where, value)
            size = self._int(f"{where}.bytes", value.get("bytes"), 0, 2**60)
            yield (
                name,
                FileRecord(size, int(self._hex(f"{where}.crc32", value.get("crc32"), 8), 16)),
            )

    def _table(
        self,
        where: str,
        value: Any,
        world_size: int,
        files: dict[str, FileRecord],
        base: Base | None,
        optimizers: int,
    ) -> Table:
        value = self._object(where, value)

        def take(name: str, check: Callable[..., Any], *bounds: Any) -> Any:
            return check(f"{where}.{name}", value.get(name), *bounds)

        dim = take("dim", self._int, 1, 2**24)
        owners, optimizer = value.get("owners"), value.get("optimizer")
        states = {
            self._text(f"{where}.states", name, 100): self._state(
                f"{where}.states[{name!r:.100}]", each, dim
            )
            for name, each in take("states", self._object).items()
        }
        if taken := sorted(states.keys() & _OWN_COLUMNS):
            raise self._refuse(f"{where}.states", "without names of other columns", taken)
        complete = take("complete", self._bool)
        if base is None and not complete:
            raise CheckpointError(f"{self._path}: {where} has changes only, but there is no base")
        shards = tuple(
            self._shard(f"{where}.shards[{rank}]", each, rank, files)
            for rank, each in enumerate(take("shards", self._list))
        )
        if len(shards) != world_size:
            raise self._refuse(f"{where}.shards", f"{world_size} entries", f"{len(shards)}")
        row_bytes = 8 + dim * getattr(torch, take("dtype", self._choice, ROW_DTYPES)).itemsize
        for shard in shards:
            if complete and shard.rows != shard.size:
                raise self._refuse(f"{where}.shards.rows", f"its size {shard.size}", shard.rows)
            if self._has_files and files[shard.file].bytes < shard.rows * row_bytes:
                raise self._refuse(
                    f"{where}.shards[{shard.rank}].rows",
                    f"as many as {shard.file} has room for",
                    shard.rows,
                )
        return Table(
            layer=take("layer", self._text, 1000),
            dim=dim,
            dtype=value["dtype"],
            key_dtype=take("key_dtype", self._choice, ("int64", "int32")),
            capacity=take("capacity", self._int, 1, 2**31 - 1),
            hash_table=take("hash_table", self._bool),
            placement=take("placement", self._choice, ("hash", "modulo")),
            owners=None if owners is None else int(take("owners", self._hex, 8), 16),
            seed=take("seed", self._int, -(2**63), 2**63 - 1),
            initializer=take("initializer", self._text),
            optimizer=None
            if optimizer is None
            else take("optimizer", self._int, 0, optimizers - 1),
            states=states,
            settings=take("settings", self._state_of),
            complete=complete,
            shards=shards,
        )

    def _state(self, where: str, value: Any, dim: int) -> State:
        value = self._object(where, value)
        shape = self._list(f"{where}.shape", value.get("shape"))
        if shape and (len(shape) > 1 or type(shape[0]) is not int or shape[0] != dim):
            raise self._refuse(f"{where}.shape", f"[] or [{dim}]", shape)
        dtype = self._choice(f"{where}.dtype", value.get("dtype"), ROW_DTYPES)
        return State(dtype, tuple(shape))

    def _shard(self, where: str, value: Any, rank: int, files: dict[str, FileRecord]) -> Shard:
        value = self._object(where, value)
        file = self._file(f"{where}.file", value.get("file"))
        if self._has_files and file not in files:
            raise self._refuse(f"{where}.file", "one of files", file)
        if file in self._of_tables:
            raise self._refuse(f"{where}.file", "a file of its own", file)
        self._of_tables.add(file)
        return Shard(
            rank=self._int(f"{where}.rank", value.get("rank"), rank, rank),
            file=file,
            rows=self._int(f"{where}.rows", value.get("rows"), 0, _MOST_ROWS),
            size=self._int(f"{where}.size", value.get("size"), 0, _MOST_ROWS),
        )
