"""Removes keys from checkpoints, so that no file contains data for them."""

from __future__ import annotations

import os
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import CheckpointError
from ..ops._checks import KEY_DTYPES
from ..tables.admission import ExactCounts, size_of
from ..tables.hash_table import HashTable
from .draft import entries, published, recover, refuse_writers
from .files import naming
from .folder import chain, steps_in
from .lock import lock_folder
from .manifest import MANIFEST, Manifest, Shard, Table
from .manifest_file import write_manifest
from .reshard import ColumnWriter, verify_files
from .table_files import (
    Chain,
    columns_of,
    columns_of_shard,
    key_pieces,
    opened,
    parts_of,
    removed_keys,
)


def forget(
    path: str | os.PathLike[str],
    keys: torch.Tensor | Iterable[int],
    table: str | None = None,
) -> int:
    """Remove keys from checkpoints: no file will contain their vectors, states or scores.

    Their counts are removed too if `MinCount` counts exactly. A sketch does not store keys, so it
    is not changed.

    Checkpoints that need not change are left alone; each of the others is replaced in one step, so
    all of them can be loaded at any time. After an error or a crash, call the function again. It
    verifies all files before it changes anything, and again at the end. The keys themselves may
    remain in lists of removed keys. The file system may keep blocks of deleted files until it needs
    them. If the table is still being trained, call `layer.erase` first, and save only after this
    call.

    Args:
        path: a checkpoint, to be rewritten together with its chain and every checkpoint that builds
            on that chain; or a folder, to rewrite all of its checkpoints. `DcpState` is not
            supported.
        keys: int64 or int32, any shape.
        table: name of the only table to change; None for all tables with a hash table.

    Returns:
        The total number of rows removed from all files.

    Raises:
        CheckpointError: a file is damaged, there is no checkpoint, the chain of another checkpoint
            next to `path` cannot be read, a save is in progress there, another job is saving to the
            folder, or a file cannot be written.
        TypeError: keys are not integers.
        ValueError: there is no such table, or it has no hash table.
    """
    keys = torch.as_tensor(keys if isinstance(keys, torch.Tensor) else list(keys)).reshape(-1)
    if keys.dtype not in KEY_DTYPES and len(keys):
        raise TypeError(f"forget: keys must be int64 or int32, got {keys.dtype}")
    wanted = HashTable(max(1, len(keys)), device="cpu")
    wanted.find_or_insert(keys.to("cpu", torch.int64))
    path = Path(path).absolute()
    one = (path / MANIFEST).exists()
    folder = path.parent if one else path
    recover(folder)
    # Other jobs must not save in the meantime. The lock is held as long as this variable exists.
    _lock = lock_folder(folder) if steps_in(folder) else None
    refuse_writers(folder)
    chains = _chains_with(path) if one else [chain(each) for each in steps_in(folder).values()]
    if not chains:
        raise CheckpointError(f"{folder}: has no checkpoints")
    names = _tables(chains, table)
    _verify(chains)
    removed = 0
    for related in _related(chains):
        files = _Files(related, names, wanted)
        # Start with the newest checkpoint: if it lists keys as removed, it can be loaded whether or
        # not its base still has them.
        removed += sum(map(files.rewrite, sorted(related, key=len, reverse=True)))
    _verify([chain(links[-1][0]) for links in chains])
    return removed


def _verify(chains: Iterable[Chain]) -> None:
    for folder, manifest in dict(links[-1] for links in chains).items():
        verify_files(folder, manifest)


def _related(chains: Iterable[Chain]) -> list[list[Chain]]:
    """Group the chains by their first checkpoint."""
    groups: dict[Path, list[Chain]] = {}
    for links in chains:
        groups.setdefault(links[0][0], []).append(links)
    return list(groups.values())


def _chains_with(path: Path) -> list[Chain]:
    """Return all chains next to `path` that start at the same checkpoint as its own chain."""
    first = chain(path)[0][0]
    # A chain that cannot be read is an error: it may build on `path`, and contain the keys.
    chains = [
        chain(each)
        for each in entries(path.parent)
        if (each / MANIFEST).exists() and not each.name.startswith(".")
    ]
    return [links for links in chains if links[0][0] == first]


def _tables(chains: Iterable[Chain], table: str | None) -> list[str]:
    """Return the names of the tables to change."""
    tables = {name: each for links in chains for name, each in links[-1][1].tables.items()}
    if table is None:
        return [name for name, each in tables.items() if each.hash_table]
    if table not in tables:
        raise ValueError(f"forget: no table named {table}; tables: {', '.join(tables)}")
    if not tables[table].hash_table:
        raise ValueError(f"forget: table {table} has no hash table, so each key has a row for ever")
    return [table]


class _Files:
    """Finds the keys to remove in all files of checkpoints that build on the same complete one.

    Args:
        chains: the chain of each checkpoint.
        names: names of the tables to change.
        wanted: the keys to remove.
    """

    def __init__(self, chains: Iterable[Chain], names: Sequence[str], wanted: HashTable) -> None:
        self._names = names
        self._wanted = wanted
        # For each checkpoint, table and rank: the wanted keys that have a row in the rank's file.
        self._rows: dict[tuple[Path, str, int], set[int]] = {}
        # For each checkpoint, table and rank: whether the rank's file has counts of wanted keys.
        self._counted: dict[tuple[Path, str, int], bool] = {}
        # For each checkpoint and table: the wanted keys that are listed there as removed.
        self._removed: dict[tuple[Path, str], set[int]] = {}
        # For each table and rank: the wanted keys that have a row in any file.
        self._anywhere: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
        for links in chains:
            folder, manifest = links[-1]
            for name in self._tables_of(manifest):
                self._look(folder, name, manifest.tables[name])

    def _tables_of(self, manifest: Manifest) -> list[str]:
        return [name for name in self._names if name in manifest.tables]

    def _look(self, folder: Path, name: str, table: Table) -> None:
        for shard in table.shards:
            rows = self._rows[folder, name, shard.rank] = set()
            with opened(folder, table, shard) as file:
                for _, keys in key_pieces(file, shard.rows, 8):
                    rows.update(keys[self._wanted.find(keys) >= 0].tolist())
            exact = table.counts_kind == ExactCounts.kind
            self._counted[folder, name, shard.rank] = (
                exact and len(self._other_counts(folder, table, shard)["counts"]) < shard.counts
            )
            self._anywhere[name, shard.rank] |= rows
        removed = removed_keys(folder, table, table.shards)
        self._removed[folder, name] = set(removed[self._wanted.find(removed) >= 0].tolist())

    def _rows_in_use(self, links: Chain, name: str) -> Counter[int]:
        """Return, for each rank, the number of wanted keys in its table at the end of the chain."""
        ranks: dict[int, int] = {}
        for folder, table in parts_of(links, name):
            for key in self._removed[folder, name]:
                ranks.pop(key, None)
            for shard in table.shards:
                ranks |= dict.fromkeys(self._rows[folder, name, shard.rank], shard.rank)
        return Counter(ranks.values())

    def rewrite(self, links: Chain) -> int:
        """Rewrite the last checkpoint of a chain; return the number of rows removed."""
        folder, manifest = links[-1]
        todo = [
            (name, shard)
            for name in self._tables_of(manifest)
            for shard in manifest.tables[name].shards
            if self._concerns(folder, manifest, name, shard)
        ]
        if not todo:
            return 0
        files, tables, gone = dict(manifest.files), dict(manifest.tables), 0
        with published(folder, replace=True) as draft:
            for name, shard in todo:
                table, rows = tables[name], self._rows[folder, name, shard.rank]
                listed = torch.empty(0, dtype=torch.int64)
                if not table.complete:
                    wanted = sorted(self._anywhere[name, shard.rank])
                    added = torch.tensor(wanted, dtype=torch.int64)  # int64 even if wanted is empty
                    listed = torch.cat([removed_keys(folder, table, [shard]), added]).unique()
                counts = self._other_counts(folder, table, shard)
                new = replace(
                    shard,
                    counts=size_of(str(table.counts_kind), counts["counts"]) if counts else 0,
                    rows=shard.rows - len(rows),
                    size=shard.size - self._rows_in_use(links, name)[shard.rank],
                    removed=len(listed),
                )
                gone += len(rows)
                path = draft.folder / shard.file
                # Keep the "rows" column, if any, unless keys are removed from this rank's files.
                with_rows = not self._anywhere[name, shard.rank] and _has_rows(folder, table, shard)
                columns = columns_of(table, new.rows), columns_of_shard(table, new, with_rows)
                writer = ColumnWriter(path, [*columns[0], *columns[1]], {"table": name[:500]})
                names = [c.name for c in columns[0]] + ["rows"] * with_rows
                self._copy_rows(folder, table, shard, writer, names)
                writer.append(counts)
                if len(listed):
                    writer.append({"removed": listed})
                files[shard.file] = writer.finish()
                shards = tuple(new if each is shard else each for each in table.shards)
                tables[name] = replace(table, shards=shards)
            for file in files.keys() - {shard.file for _, shard in todo}:
                _keep(folder / file, draft.folder / file)
            write_manifest(
                draft.folder, replace(manifest, tables=tables, files=files, forgotten=True)
            )
        return gone

    def _concerns(self, folder: Path, manifest: Manifest, name: str, shard: Shard) -> bool:
        """Return whether a shard's file must be rewritten."""
        if self._counted[folder, name, shard.rank]:
            return True
        if manifest.tables[name].complete:
            return bool(self._rows[folder, name, shard.rank])
        return bool(self._anywhere[name, shard.rank])

    def _other_counts(self, folder: Path, table: Table, shard: Shard) -> dict[str, torch.Tensor]:
        """Return the file's counts, without those of the wanted keys, by column name."""
        if table.counts_kind is None:
            return {}
        with opened(folder, table, shard) as file:
            counts = file.read("counts")
        if table.counts_kind == ExactCounts.kind:
            counts = counts[self._wanted.find(counts[:, 0].contiguous()) < 0]
        return {"counts": counts}

    def _copy_rows(
        self, folder: Path, table: Table, shard: Shard, writer: ColumnWriter, names: Sequence[str]
    ) -> None:
        """Copy columns of all rows except those of the wanted keys."""
        row_bytes = sum(column.nbytes for column in columns_of(table, 1))
        with opened(folder, table, shard) as file:
            for begin, keys in key_pieces(file, shard.rows, row_bytes):
                stay = (self._wanted.find(keys) < 0).nonzero().squeeze(1)
                writer.append({name: file.read(name, begin, len(keys))[stay] for name in names})


def _has_rows(folder: Path, table: Table, shard: Shard) -> bool:
    """Return whether a shard's file lists its keys' rows."""
    with opened(folder, table, shard) as file:
        return "rows" in file.places


def _keep(source: Path, target: Path) -> None:
    """Link a file into another folder, or copy it if the file system cannot do that."""
    with naming(target, "cannot be written"):
        try:
            os.link(source, target)
        except OSError:
            shutil.copyfile(source, target)
            with open(target, "rb+") as file:
                os.fsync(file)
