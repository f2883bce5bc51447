"""Writes ``manifest.json``, and reads it, checking everything in it."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..serving.format import COMBINERS, MISSES
from ..tables.admission import ExactCounts, Sketch
from ..tables.scores import KINDS
from .encoding import check_nesting
from .files import FileRecord, naming, plain_file, write_small
from .manifest import (
    CHECKSUM,
    DENSE,
    FORMAT,
    MANIFEST,
    VERSION,
    WITHOUT_REMOVALS,
    Base,
    Lookups,
    Manifest,
    Scores,
    Shard,
    State,
    Table,
    rank_file,
)

_MOST_BYTES = 256 << 20
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}\Z")
_MOST_ROWS = 2**40
ROW_DTYPES = ("float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8")
# Reserved column names, which no state may have; see docs/checkpoint_format.md.
_OWN_COLUMNS = {"keys", "vectors", "scores", "removed", "rows", "counts"}
# Largest valid clock for each kind of score.
_CLOCKS = {name: kind.most_clock for name, kind in KINDS.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum; only then is the folder a checkpoint.

    Raises:
        CheckpointError: the files cannot be written, or `read_manifest` would refuse them.
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
    _parsed(path, text)  # raise now if `read_manifest` would refuse the text
    for name, content in ((MANIFEST, text), (CHECKSUM, b"%08x\n" % zlib.crc32(text))):
        write_small(folder / name, content)


def _values_of(manifest: Manifest) -> dict[str, Any]:
    removals = any(shard.removed for table in manifest.tables.values() for shard in table.shards)
    # A version of sparsekit that does not support removals would bring back removed keys, so it
    # must refuse these checkpoints.
    version = VERSION if removals else WITHOUT_REMOVALS
    values = {"format": FORMAT, "format_version": version, **dataclasses.asdict(manifest)}
    values["files"] = {
        name: {"bytes": file.bytes, "crc32": f"{file.crc32:08x}"}
        for name, file in manifest.files.items()
    }
    for name, table in manifest.tables.items():
        owners = None if table.owners is None else f"{table.owners:08x}"
        values["tables"][name]["owners"] = owners
    return values


def without_files(path: Path, manifest: Manifest) -> Manifest:
    """Apply the checks of `read_manifest` to a manifest that is not in a file, and return it.

    Raises:
        CheckpointError: see `read_manifest`.
    """
    text = json.dumps(_values_of(manifest))
    return _Reader(_Value(path, "", json.loads(text)), has_files=False).manifest()


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest and check everything in it.

    Raises:
        CheckpointError: the manifest is missing, damaged, malicious or in a newer format.
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
    return _Reader(_Value(path, "", values)).manifest()


def _read_small(path: Path, most: int) -> bytes:
    with naming(path, "cannot be read"), plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise CheckpointError(f"{path}: {size} bytes are too many; it has {most} at most")
        return file.read(most + 1)


@dataclasses.dataclass(frozen=True)
class _Value:
    """A value in parsed JSON, with its path in the document for error messages.

    Attributes:
        path: path of the file.
        where: path of the value in the document, such as ``tables['a'].dim``; empty for the root.
        value: the value; None if it is missing.
    """

    path: Path
    where: str
    value: Any

    def refusal(self, expected: str) -> CheckpointError:
        where = self.where or "it"
        return CheckpointError(f"{self.path}: {where} must be {expected}, got {self.value!r:.80}")

    def must(self, fits: bool, expected: str) -> Any:
        """Return the value; raise CheckpointError unless ``fits`` is true."""
        if not fits:
            raise self.refusal(expected)
        return self.value

    def instead(self, value: Any) -> _Value:
        """Wrap another value, but keep this one's path for error messages."""
        return dataclasses.replace(self, value=value)

    def __getitem__(self, name: str) -> _Value:
        """Return the member called name; the value must be an object."""
        where = f"{self.where}.{name}" if self.where else name
        return _Value(self.path, where, self.object().get(name))

    def members(self) -> Iterator[tuple[str, _Value]]:
        """Yield the members of an object whose names are not fixed."""
        for name, value in self.object().items():
            yield name, _Value(self.path, f"{self.where}[{name!r:.100}]", value)

    def entries(self) -> Iterator[_Value]:
        """Yield the entries of a list."""
        for i, value in enumerate(self.list()):
            yield _Value(self.path, f"{self.where}[{i}]", value)

    def object(self) -> dict[str, Any]:
        return self.must(type(self.value) is dict, "an object")

    def list(self) -> list[Any]:
        return self.must(type(self.value) is list, "a list")

    def whole(self, least: int, most: int) -> int:
        fits = type(self.value) is int and least <= self.value <= most
        return self.must(fits, f"a whole number in [{least}, {most}]")

    def text(self, most: int) -> str:
        fits = type(self.value) is str and len(self.value) <= most
        return self.must(fits, f"a text of at most {most} characters")

    def hexadecimal(self, digits: int) -> str:
        fits = type(self.value) is str and re.fullmatch(f"[0-9a-f]{{{digits}}}", self.value)
        return self.must(bool(fits), f"{digits} hexadecimal digits")

    def choice(self, choices: tuple[str, ...]) -> str:
        fits = type(self.value) is str and self.value in choices
        return self.must(fits, f"one of {', '.join(choices)}")

    def flag(self) -> bool:
        return self.must(type(self.value) is bool, "true or false")

    def file(self) -> str:
        # Allow only names of files directly in the folder, so that no name can point outside it.
        fits = type(self.value) is str and _FILE.match(self.value)
        return self.must(bool(fits), "the name of a file in the folder")

    def state(self) -> dict[str, Any]:
        value = self.object()
        try:
            check_nesting(value)
        except CheckpointError as error:
            raise CheckpointError(f"{self.path}: {self.where}: {error}") from None
        return value


class _Reader:
    """Converts parsed JSON to a `Manifest`, and checks it.

    Args:
        root: the whole document.
        has_files: whether the manifest belongs to a folder of files.
    """

    def __init__(self, root: _Value, has_files: bool = True) -> None:
        root["format"].must(root["format"].value == FORMAT, repr(FORMAT))
        version = root["format_version"].whole(1, 2**31)
        if version > VERSION:
            raise CheckpointError(
                f"{root.path}: format_version {version} is newer than {VERSION}, which this "
                f"version of sparsekit reads; sparsekit {root['version'].value!r:.20} wrote it"
            )
        self._root = root
        self._has_files = has_files
        self._world_size = root["world_size"].whole(1, 2**20)
        base = root["base"]
        self._base = None
        if base.value is not None:
            self._base = Base(base["folder"].file(), base["id"].hexadecimal(32))
        self._files = {
            each.instead(name).file(): FileRecord(
                each["bytes"].whole(0, 2**60), int(each["crc32"].hexadecimal(8), 16)
            )
            for name, each in root["files"].members()
        }
        self._optimizers = [each.state() for each in root["optimizers"].entries()]
        self._of_tables: set[str] = set()

    def manifest(self) -> Manifest:
        root, ranks, step = self._root, self._root["ranks"], self._root["step"]
        if (count := len(ranks.list())) != self._world_size:
            raise ranks.instead(f"{count} entries").refusal(f"{self._world_size} entries")
        for name in (DENSE, *map(rank_file, range(self._world_size))):
            if self._has_files and name not in self._files:
                raise root["files"].instead(sorted(self._files)[:5]).refusal(f"a list with {name}")
        return Manifest(
            id=root["id"].hexadecimal(32),
            step=None if step.value is None else step.whole(0, 2**63 - 1),
            base=self._base,
            world_size=self._world_size,
            tables={
                _Value(root.path, "the name of a table", name).text(1000): self._table(table)
                for name, table in root["tables"].members()
            },
            files=self._files,
            optimizers=self._optimizers,
            ranks=[each.state() for each in ranks.entries()],
            version=root["version"].text(100),
            forgotten=root["forgotten"].value is not None and root["forgotten"].flag(),
        )

    def _table(self, table: _Value) -> Table:
        dim = table["dim"].whole(1, 2**24)
        dtype = table["dtype"].choice(ROW_DTYPES)
        owners, optimizer = table["owners"], table["optimizer"]
        states = {
            table["states"].instead(name).text(100): _state(each, dim)
            for name, each in table["states"].members()
        }
        if taken := sorted(states.keys() & _OWN_COLUMNS):
            raise table["states"].instead(taken).refusal("without names of other columns")
        complete = table["complete"].flag()
        if self._base is None and not complete:
            raise CheckpointError(
                f"{table.path}: {table.where} has changes only, but there is no base"
            )
        row_bytes = 8 + dim * getattr(torch, dtype).itemsize
        scores = None if table["scores"].value is None else _scores(table["scores"])
        counts = None if scores is None else scores.counts
        shards = tuple(
            self._shard(shard, rank, complete, row_bytes, counts)
            for rank, shard in enumerate(table["shards"].entries())
        )
        if len(shards) != self._world_size:
            raise table["shards"].instead(f"{len(shards)}").refusal(f"{self._world_size} entries")
        return Table(
            layer=table["layer"].text(1000),
            dim=dim,
            dtype=dtype,
            key_dtype=table["key_dtype"].choice(("int64", "int32")),
            capacity=table["capacity"].whole(1, 2**31 - 1),
            hash_table=table["hash_table"].flag(),
            placement=table["placement"].choice(("hash", "modulo")),
            owners=None if owners.value is None else int(owners.hexadecimal(8), 16),
            seed=table["seed"].whole(-(2**63), 2**63 - 1),
            initializer=table["initializer"].text(10_000),
            optimizer=None
            if optimizer.value is None
            else optimizer.whole(0, len(self._optimizers) - 1),
            states=states,
            settings=table["settings"].state(),
            complete=complete,
            shards=shards,
            scores=scores,
            lookups=None if table["lookups"].value is None else _lookups(table["lookups"]),
        )

    def _shard(
        self, shard: _Value, rank: int, complete: bool, row_bytes: int, counts_kind: str | None
    ) -> Shard:
        file = shard["file"].file()
        if self._has_files and file not in self._files:
            raise shard["file"].refusal("one of files")
        shard["file"].must(file not in self._of_tables, "a file of its own")
        self._of_tables.add(file)
        rows, size = shard["rows"].whole(0, _MOST_ROWS), shard["size"].whole(0, _MOST_ROWS)
        removed = 0
        if shard["removed"].value is not None:  # older versions do not write this number
            removed = shard["removed"].whole(0, 0 if complete else _MOST_ROWS)
        if complete:
            shard["rows"].must(rows == size, f"its size {size}")
        counts = shard["counts"].whole(0, _MOST_ROWS) if counts_kind else 0
        least = rows * row_bytes + 8 * removed + 16 * counts
        if self._has_files and self._files[file].bytes < least:
            raise shard["rows"].refusal(f"as many as {file} has room for")
        rank = shard["rank"].whole(rank, rank)
        return Shard(rank=rank, file=file, rows=rows, size=size, removed=removed, counts=counts)


def _scores(scores: _Value) -> Scores:
    kind = scores["kind"].choice(tuple(_CLOCKS))
    return Scores(
        kind=kind,
        clock=scores["clock"].whole(0, _CLOCKS[kind]),
        set_by_user=scores["set_by_user"].flag(),
        counts=None
        if scores["counts"].value is None
        else scores["counts"].choice((ExactCounts.kind, Sketch.kind)),
    )


def _lookups(lookups: _Value) -> Lookups:
    miss, padding_key = lookups["miss"].choice(MISSES), lookups["padding_key"]
    return Lookups(
        miss=miss,
        fallbacks=lookups["fallbacks"].whole(*((1, 2**31 - 1) if miss == "fallback" else (0, 0))),
        combiner=lookups["combiner"].choice(COMBINERS),
        padding_key=None if padding_key.value is None else padding_key.whole(-(2**63), 2**63 - 1),
        limits_norms=lookups["limits_norms"].flag(),
    )


def _state(state: _Value, dim: int) -> State:
    shape = state["shape"].list()
    if shape:
        state["shape"].must(type(shape[0]) is int and shape == [dim], f"[] or [{dim}]")
    return State(state["dtype"].choice(ROW_DTYPES), tuple(shape))
