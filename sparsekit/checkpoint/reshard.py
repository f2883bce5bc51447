"""Rewrites a checkpoint, or a whole chain, for a different number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import os
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO

import torch

from .. import ops
from ..errors import CheckpointError
from ..tables.admission import size_of
from ..tables.hash_table import HashTable
from ..tables.owners import even_map
from .counts import counts_on_ranks
from .draft import published
from .files import FileRecord, check_sum, naming, plain_file, record_of, write_small
from .folder import chain, check_sizes, resolved
from .manifest import DENSE, Manifest, Shard, Table, rank_file, table_file
from .manifest_file import write_manifest
from .snapshot import owners_crc
from .table_files import columns_of, columns_of_shard, key_pieces, opened, parts_of, removed_keys
from .tensor_file import Column, TensorFile, header_of

# A callback that receives the size in bytes of each file or piece after it has been read.
OnProgress = Callable[[int], None]


def verify(path: str | os.PathLike[str], on_progress: OnProgress = lambda _: None) -> list[Path]:
    """Verify the checksums and headers of all files in a checkpoint's chain.

    Args:
        path: a checkpoint, or a folder whose latest checkpoint is verified.
        on_progress: called with the size in bytes of each file that has been read.

    Returns:
        The folders of the chain, starting with the complete checkpoint's folder.

    Raises:
        CheckpointError: a file is missing or damaged; the message names the first one.
    """
    links = chain(resolved(path))
    for folder, manifest in links:
        verify_files(folder, manifest, on_progress)
    return [folder for folder, _ in links]


def verify_files(
    folder: Path, manifest: Manifest, on_progress: OnProgress = lambda _: None
) -> None:
    """Verify the files of one checkpoint, as `verify` does."""
    check_sizes(folder, manifest)
    for name, written in manifest.files.items():
        check_sum(folder / name, written)
        on_progress(written.bytes)
    for table in manifest.tables.values():
        for shard in table.shards:
            with opened(folder, table, shard):
                pass


def reshard(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    world_size: int,
    on_progress: OnProgress = lambda _: None,
) -> Path:
    """Write the rows from a checkpoint's whole chain as one complete checkpoint.

    Keys are assigned to ranks as in a layer with the table's placement and an even distribution of
    the virtual shards. If the number of ranks is unchanged, each rank keeps its other states, such
    as random generators; otherwise all ranks get rank 0's states.

    Args:
        path: a checkpoint, or a folder whose latest checkpoint is used. The checkpoint is verified
            first.
        out: folder of the new checkpoint.
        world_size: number of ranks to divide the new checkpoint among, >= 1.
        on_progress: called with the size in bytes of each file that has been verified.

    Raises:
        CheckpointError: path is damaged; out already exists or cannot be written.
        ValueError: world_size is below 1.
    """
    if world_size < 1:
        raise ValueError(f"reshard: world_size={world_size} must be >= 1")
    verify(path, on_progress)
    links = chain(resolved(path))
    folder, newest = links[-1]
    with published(out) as draft:
        files: dict[str, FileRecord] = {}
        tables = {}
        for number, name in enumerate(newest.tables):
            tables[name] = _reshard_table(links, name, draft.folder, number, world_size, files)
        same = world_size == newest.world_size
        for rank in range(world_size):
            own = rank_file(rank)
            files[own] = _copy(folder / rank_file(rank if same else 0), draft.folder / own)
        files[DENSE] = _copy(folder / DENSE, draft.folder / DENSE)
        ranks = newest.ranks if same else [newest.ranks[0]] * world_size
        manifest = replace(
            newest, id=draft.id, base=None, world_size=world_size, tables=tables, files=files,
            ranks=ranks,
        )  # fmt: skip
        write_manifest(draft.folder, manifest)
    return draft.target


def _reshard_table(
    links: Sequence[tuple[Path, Manifest]],
    name: str,
    folder: Path,
    number: int,
    world_size: int,
    files: dict[str, FileRecord],
) -> Table:
    parts = parts_of(links, name)
    table = parts[-1][1]
    owners = None
    if table.placement == "hash" and world_size > 1:
        owners = even_map(world_size, torch.device("cpu"))
    counts = torch.zeros(world_size, dtype=torch.int64)
    with live_pieces(parts) as pieces:
        for _, _, keys, kept in pieces:
            counts += ops.bucketize(keys[kept], world_size, owners)[1]
    names = [table_file(number, rank) for rank in range(world_size)]
    sizes = counts.tolist()
    shards = [
        Shard(rank, file, size, size)
        for rank, (file, size) in enumerate(zip(names, sizes, strict=True))
    ]
    waiting = counts_on_ranks(parts[-1][0], table, world_size, owners)
    if waiting:
        shards = [
            replace(shard, counts=size_of(str(table.counts_kind), of_rank))
            for shard, of_rank in zip(shards, waiting, strict=True)
        ]
    writers = [
        ColumnWriter(
            folder / shard.file,
            [*columns_of(table, shard.rows), *columns_of_shard(table, shard, with_rows=False)],
        )
        for shard in shards
    ]
    with live_pieces(parts) as pieces:
        for source, begin, keys, kept in pieces:
            _, here, order = ops.bucketize(keys[kept], world_size, owners)
            columns = columns_of(table, 1)
            values = {c.name: source.read(c.name, begin, len(keys)) for c in columns}
            for writer, rows in zip(writers, kept[order].split(here.tolist()), strict=True):
                if len(rows):
                    writer.append({name: column[rows] for name, column in values.items()})
    for writer, of_rank in zip(writers, waiting, strict=False):
        writer.append({"counts": of_rank})
    for file, writer in zip(names, writers, strict=True):
        files[file] = writer.finish()
    capacity = max(table.capacity if table.hash_table else 1, *sizes)
    return replace(
        table, capacity=capacity, owners=owners_crc(owners), complete=True,
        shards=tuple(shards),
    )  # fmt: skip


Pieces = Generator[tuple[TensorFile, int, torch.Tensor, torch.Tensor]]


def live_pieces(parts: Sequence[tuple[Path, Table]]) -> contextlib.closing[Pieces]:
    """Yield pieces of a table: file, index of the first row, keys, and indices of live keys.

    A key is live unless a newer checkpoint contains it or has removed it. Pieces from the newest
    checkpoint come first. The keys of incremental checkpoints are kept in memory; the complete
    checkpoint's keys are not. Use the result in a ``with`` statement: otherwise, after an error in
    the caller, the file stays open as long as the traceback exists.
    """
    return contextlib.closing(_live_pieces(parts))


def _live_pieces(parts: Sequence[tuple[Path, Table]]) -> Pieces:
    changes = sum(s.rows + s.removed for _, table in parts[1:] for s in table.shards)
    newer = HashTable(max(1, changes)) if changes else None
    for place, (folder, table) in reversed(list(enumerate(parts))):
        row_bytes = table.dim * getattr(torch, table.dtype).itemsize
        for shard in table.shards:
            with opened(folder, table, shard) as file:
                for begin, keys in key_pieces(file, shard.rows, row_bytes):
                    kept = torch.arange(len(keys))
                    if newer is not None:
                        kept = (newer.find(keys) < 0).nonzero().squeeze(1)
                    yield file, begin, keys, kept
                    if newer is not None and place:
                        newer.find_or_insert(keys)
        if newer is not None:
            # Add the removed keys last, since a checkpoint's removals apply before its rows.
            newer.find_or_insert(removed_keys(folder, table, table.shards))


class ColumnWriter:
    """Writes a file of tensors by appending rows to all columns at once.

    The file is open only during `append` and `finish`, so the number of writers is not limited.
    """

    def __init__(self, path: Path, columns: list[Column], metadata: Mapping[str, str] = {}) -> None:
        self.path = path
        self.columns = columns
        header = header_of(columns, metadata)
        sizes = (column.nbytes for column in columns)
        *ends, self._size = itertools.accumulate(sizes, initial=len(header))
        self._ends = {column.name: end for column, end in zip(columns, ends, strict=True)}
        with self._opened("xb") as file:
            file.write(header)

    def append(self, values: Mapping[str, torch.Tensor]) -> None:
        """Append the same number of rows to each column."""
        with self._opened("r+b") as file:
            for name, tensor in values.items():
                file.seek(self._ends[name])
                file.write(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
                self._ends[name] += tensor.nbytes

    def finish(self) -> FileRecord:
        """Sync the file to disk, then read it again to compute its CRC-32."""
        with self._opened("r+b") as file:
            os.fsync(file)
        record = record_of(self.path)
        if record.bytes != self._size:
            raise CheckpointError(f"{self.path}: has {record.bytes} bytes instead of {self._size}")
        return record

    @contextlib.contextmanager
    def _opened(self, mode: str) -> Iterator[IO[bytes]]:
        with naming(self.path, "cannot be written"), open(self.path, mode) as file:
            yield file


def _copy(source: Path, target: Path) -> FileRecord:
    """Copy a small file and return the copy's record."""
    with plain_file(source) as file:
        content = file.read()
    write_small(target, content)
    return FileRecord(len(content), zlib.crc32(content))
