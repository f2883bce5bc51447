"""Imports other libraries' tables as a checkpoint, and exports a checkpoint's tables as files."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import zipfile
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import _pybind, hashing
from .._extras import needed
from ..distributed.world import settings
from ..errors import CheckpointError
from ..tables.hash_table import HashTable
from .draft import published
from .files import FileRecord, naming
from .folder import chain, resolved
from .manifest import DENSE, Manifest, Shard, Table, rank_file, table_file
from .manifest_file import write_manifest
from .npz_source import name_note, npz
from .reshard import ColumnWriter, OnProgress, live_pieces, verify
from .sources import ForeignTable, Pieces, sok1, sok2, torchrec
from .table_files import columns_of, parts_of
from .tensor_file import carried, dtype_name, write

KINDS = ("sok1", "sok2", "npz", "torchrec")
FORMATS = ("npz", "parquet", "safetensors")
_MOST_KEYS = 2**31 - 1  # maximum number of rows in a HashTable
_FEW_KEYS = 1 << 16
_LONGEST_STEM = 100


def sources_of(
    kind: str, path: str | os.PathLike[str], dims: Mapping[str, int] = {}
) -> list[ForeignTable]:
    """List the tables saved by another library.

    Args:
        kind: ``"sok1"`` or ``"sok2"``: a dump from version 1 or 2 of HugeCTR's SparseOperationKit;
            ``"npz"``: files with ``vectors`` and optionally ``keys``; ``"torchrec"``: a saved state
            of an EmbeddingBagCollection or EmbeddingCollection.
        path: a file or a folder, depending on the kind.
        dims: dim of each variable, by name; for sok1 only, since its files do not record dim. The
            entry ``""`` applies to all variables not listed.

    Raises:
        CheckpointError: no table was found, or a file is damaged; the message names the file.
        ValueError: kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"sources_of: kind={kind!r} is none of {', '.join(KINDS)}")
    path = Path(path)
    if not os.path.exists(path):
        raise CheckpointError(f"{path}: there is no such file or folder")
    if kind == "sok1":
        return sok1(path, dict(dims))
    return {"sok2": sok2, "npz": npz, "torchrec": torchrec}[kind](path)


def import_tables(
    sources: Sequence[ForeignTable],
    out: str | os.PathLike[str],
    names: Mapping[str, str] = {},
    on_progress: OnProgress = lambda _: None,
) -> Path:
    """Write another library's tables to a checkpoint that any number of ranks can load.

    The checkpoint has neither dense tensors nor optimizers. Load it without ``optimizer``; if the
    model has dense tensors, also pass ``strict=False``.

    Args:
        sources: see `sources_of`.
        out: folder of the new checkpoint.
        names: maps a table's name to the name of its layer in the module, where the two differ.
        on_progress: called after each piece with the size of its vectors in bytes.

    Raises:
        CheckpointError: a file is damaged, a key occurs twice, two tables have the same name,
            ``names`` contains an unknown table, or out already exists or cannot be written.
    """
    unknown = sorted(names.keys() - {source.name for source in sources})
    if unknown:
        raise CheckpointError(
            f"there is no table {unknown[0]}, but {', '.join(s.name for s in sources)}"
        )
    named = {names.get(source.name, source.name): source for source in sources}
    if len(named) != len(sources):
        raise CheckpointError(f"two tables have one name: {', '.join(s.name for s in sources)}")
    with published(out) as draft:
        files: dict[str, FileRecord] = {}
        tables = {}
        for number, (name, source) in enumerate(named.items()):
            file = table_file(number, 0)
            tables[name] = _table(name, source, file)
            writer = ColumnWriter(draft.folder / file, columns_of(tables[name], source.rows))
            with contextlib.closing(_distinct(source)) as pieces:
                for keys, vectors in pieces:
                    writer.append({"keys": keys, "vectors": vectors})
                    on_progress(vectors.nbytes)
            files[file] = writer.finish()
        for file in (DENSE, rank_file(0)):
            files[file] = write(draft.folder / file, [])
        manifest = Manifest(
            id=draft.id, step=None, base=None, world_size=1, tables=tables, files=files,
            ranks=[{"random": {}, "state": {}}], version=_pybind.build_info()["version"],
        )  # fmt: skip
        write_manifest(draft.folder, manifest)
    return draft.target


def _table(name: str, source: ForeignTable, file: str) -> Table:
    # Use the default seed for a layer with this name.
    seed = int(hashing.xxh64([name], seed=settings.seed))
    return Table(
        layer=name, dim=source.dim, dtype=dtype_name(source.dtype),
        key_dtype="int64", capacity=max(1, source.rows), hash_table=True, placement="hash",
        owners=None, seed=seed, initializer="", optimizer=None, states={},
        settings={}, complete=True, shards=(Shard(0, file, source.rows, source.rows),),
    )  # fmt: skip


def _distinct(source: ForeignTable) -> Pieces:
    """Yield a source's pieces; raise CheckpointError if a key occurs twice.

    Memory use grows with the number of keys read so far, whatever size the file's header claims.
    """
    seen, done = HashTable(_FEW_KEYS), 0
    with contextlib.closing(source.pieces()) as pieces:
        for keys, vectors in pieces:
            for part in () if source.distinct else keys.split(_FEW_KEYS):
                size = done + len(part)
                if size > _MOST_KEYS:
                    raise CheckpointError(f"{source.path}: has more than {_MOST_KEYS} keys")
                if size > seen.capacity:
                    smaller, seen = seen, HashTable(min(2 * size, _MOST_KEYS))
                    seen.find_or_insert(smaller.keys())
                again = (seen.find_or_insert(part) != torch.arange(done, size)).nonzero()
                if len(again):
                    raise CheckpointError(
                        f"{source.path}: key {int(part[again[0, 0]])} is there twice, the second "
                        f"time in row {done + int(again[0, 0])}"
                    )
                done = size
            yield keys, vectors


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    format: str,
    on_progress: OnProgress = lambda _: None,
) -> Path:
    """Export each table in a checkpoint to its own file, with the rows from the whole chain.

    Each file contains ``keys`` int64 [rows], ``vectors`` [rows, dim] and the optimizer's states.
    Except in safetensors, bfloat16 values are converted to float32, since NumPy has no bfloat16.

    Args:
        path: a checkpoint, or a folder whose latest checkpoint is used. The checkpoint is verified
            first.
        out: folder to create for the files, which are named ``<table>.<format>``. Characters that
            some file systems refuse are replaced by ``_``, and long names are cut to 100
            characters; a number is added if two names would otherwise be equal. Each file stores
            the table's full name: in the metadata of Parquet and safetensors under ``table``, and
            in the archive comment of a .npz.
        format: ``"npz"``, ``"parquet"`` (needs pyarrow) or ``"safetensors"``.
        on_progress: called with the size in bytes of each file that has been verified.

    Raises:
        CheckpointError: path is damaged; out already exists or cannot be written.
        ImportError: the format is Parquet, and pyarrow is not installed.
        ValueError: format is unknown.
    """
    if format not in FORMATS:
        raise ValueError(f"export: format={format!r} is none of {', '.join(FORMATS)}")
    if format == "parquet":
        needed("pyarrow.parquet", "format 'parquet'")
    writers = {"npz": _write_npz, "parquet": _write_parquet, "safetensors": _write_safetensors}
    verify(path, on_progress)
    links = chain(resolved(path))
    with published(out) as draft:
        taken: set[str] = set()
        for name in links[-1][1].tables:
            parts = parts_of(links, name)
            stem = _stem(name, taken)
            taken.add(stem)
            file = draft.folder / f"{stem}.{format}"
            with naming(file, "cannot be written"):
                writers[format](file, parts, name)
    return draft.target


def _stem(name: str, taken: Container[str]) -> str:
    """Return a file name for a table, without suffix, that is not in ``taken``."""
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".")[:_LONGEST_STEM] or "_"
    numbered = (f"{safe}-{number}" for number in itertools.count(1))
    return next(stem for stem in itertools.chain([safe], numbered) if stem not in taken)


def _sync(path: Path) -> None:
    with io.FileIO(path) as file:
        os.fsync(file)


Parts = Sequence[tuple[Path, Table]]


def _array(values: torch.Tensor) -> np.ndarray:
    """Convert a tensor to a NumPy array; bfloat16, which NumPy does not have, becomes float32."""
    array: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def _rows(parts: Parts) -> int:
    with live_pieces(parts) as pieces:
        return sum(len(kept) for _, _, _, kept in pieces)


def _write_safetensors(path: Path, parts: Parts, name: str) -> None:
    columns = columns_of(parts[-1][1], _rows(parts))
    writer = ColumnWriter(path, columns, {"table": name})
    with live_pieces(parts) as pieces:
        for file, begin, keys, kept in pieces:
            writer.append({c.name: file.read(c.name, begin, len(keys))[kept] for c in columns})
    writer.finish()


def _write_npz(path: Path, parts: Parts, name: str) -> None:
    """Write a .npz file, one column after another."""
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        archive.comment = name_note(name)
        for column in columns_of(parts[-1][1], _rows(parts)):
            sample = _array(torch.empty(0, dtype=column.dtype))
            header = {
                "descr": np.lib.format.dtype_to_descr(sample.dtype),
                "fortran_order": False,
                "shape": column.shape,
            }
            with (
                archive.open(f"{column.name}.npy", "w", force_zip64=True) as file,
                live_pieces(parts) as pieces,
            ):
                np.lib.format.write_array_header_1_0(file, header)
                for source, begin, keys, kept in pieces:
                    values = source.read(column.name, begin, len(keys))[kept]
                    file.write(carried(torch.from_numpy(_array(values))).tobytes())
    _sync(path)


def _write_parquet(path: Path, parts: Parts, name: str) -> None:
    """Write a Parquet file, one row group after another; vectors become fixed-size lists."""
    import pyarrow as arrow
    from pyarrow import parquet

    columns = columns_of(parts[-1][1], 0)

    def batch(values: Mapping[str, torch.Tensor]) -> Any:
        arrays = {}
        for column, tensor in values.items():
            array = arrow.array(_array(tensor).reshape(-1))
            if tensor.dim() > 1:
                array = arrow.FixedSizeListArray.from_arrays(array, tensor.shape[1])
            arrays[column] = array
        return arrow.table(arrays).replace_schema_metadata({"table": name})

    schema = batch({c.name: torch.empty(c.shape, dtype=c.dtype) for c in columns}).schema
    with (
        open(path, "xb") as target,  # pyarrow itself accepts only UTF-8 paths
        parquet.ParquetWriter(target, schema) as writer,
        live_pieces(parts) as pieces,
    ):
        for file, begin, keys, kept in pieces:
            if len(kept):
                some = {c.name: file.read(c.name, begin, len(keys))[kept] for c in columns}
                writer.write_table(batch(some))
    _sync(path)
