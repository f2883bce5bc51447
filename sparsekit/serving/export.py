"""Exports the tables of a module or of a checkpoint as a snapshot."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from .._nearest import did_you_mean
from ..checkpoint.evaluation import bring_up_to_date
from ..checkpoint.files import PIECE
from ..checkpoint.folder import chain, resolved
from ..checkpoint.manifest import Lookups
from ..checkpoint.reshard import OnProgress, live_pieces, verify
from ..checkpoint.snapshot import named_tables, shard_of, unwrapped
from ..checkpoint.table_figures import initializer_of
from ..checkpoint.table_files import Chain, parts_of
from ..lookup.max_norm import limit_norms
from ..ops.init_rows import DISTRIBUTIONS
from ..tables.embedding_table import EmbeddingTable
from ..tables.init_function import Filled
from ..tables.initializers import Initializer
from .format import FIRST_FALLBACK, MISSES
from .writer import SnapshotWriter, TableWriter

# Row formats that store vectors of a dtype unchanged; for other dtypes, "float32" is used.
_AS_THEY_ARE = {"bfloat16": "bfloat16", "float16": "float16"}

Pieces = Iterator[tuple[torch.Tensor, torch.Tensor]]
# Either one choice for all tables, or a mapping from tables to choices.
Choice = str | Mapping[str, str]


@dataclass(frozen=True)
class Exported:
    """Describes a table to export.

    Attributes:
        name: name of the table.
        dim: number of elements in a vector.
        dtype: name of the vectors' dtype.
        seed: seed of initial vectors.
        initializer: distribution of initial vectors; None if it is unknown.
        why_unknown: why the distribution is unknown.
        lookups: how lookups read the table; None if it is unknown.
        counts_keys: whether the table counts keys that it has not admitted yet.
        hash_table: whether any int64 can be a key.
        pieces: yields int64 keys ``[n]`` and vectors ``[n, dim]`` on the CPU.
    """

    name: str
    dim: int
    dtype: str
    seed: int
    initializer: Initializer | None
    why_unknown: str
    lookups: Lookups | None
    counts_keys: bool
    hash_table: bool
    pieces: Callable[[], Pieces] = field(repr=False)


def export_module(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    *,
    rows: Choice | None = None,
    miss: Choice | None = None,
    tables: Sequence[str] | None = None,
    step: int | None = None,
    dense_version: int = 0,
    note: str = "",
) -> Path:
    """Write a module's tables to a snapshot.

    Lookups in it give the same results as the module's lookups in evaluation. Rows are copied from
    the CPU, a GPU or files in pieces of 8 MiB; only keys are kept in memory. Rows that an optimizer
    would bring up to date later are up to date in the snapshot. Optimizer states and the dense part
    are not written. A table that several parts of the module share is written once.

    Args:
        module: a module with sparsekit layers on a single rank.
        path: file to write; an older snapshot there is replaced.
        rows: format of rows: ``"float32"``, ``"float16"``, ``"bfloat16"``, ``"int8"`` or
            ``"int4"``; or a dict with formats by table. With None, and for tables that are not in
            the dict, the format is that of the table, but ``"float32"`` (rounded) for float64.
        miss: how lookups treat a key without a row: ``"initial"``, ``"zeros"``, ``"fallback"`` or
            ``"error"``; or a dict by table. None means the layer's setting.
        tables: names of the tables to write; None for all.
        step: training step to record.
        dense_version: the trainer's number for the dense part that belongs to these tables.
        note: text to record that says where the tables come from.

    Returns:
        The path.

    Raises:
        ValueError: a named table does not exist, an argument is not one of its choices, or a
            format cannot hold a vector; the message names the table and the key.
        RuntimeError: a table is divided among ranks, or on the meta device.
        OSError: the file cannot be written; the error names it.
    """
    found = tables_of_module(module)
    with SnapshotWriter(path, step=step, dense_version=dense_version, note=note) as snapshot:
        write_tables(snapshot, found, rows, miss, tables)
    return Path(path)


def export_checkpoint(
    checkpoint: str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    rows: Choice | None = None,
    miss: Choice | None = None,
    tables: Sequence[str] | None = None,
    dense_version: int = 0,
    on_progress: OnProgress = lambda _: None,
) -> Path:
    """Write the tables of a checkpoint, saved by any number of ranks, to a snapshot.

    If the checkpoint is incremental, the rows of the whole chain are written. Only keys and pieces
    of 8 MiB are kept in memory.

    Args:
        checkpoint: a checkpoint, or a folder whose latest checkpoint is used. It is verified first.
        path: file to write; see `export_module` for this and other arguments.
        rows: format of rows.
        miss: how lookups treat a key without a row. None means the layer's setting or, for older or
            imported checkpoints that do not record it, the initial vector, if known.
        tables: names of the tables to write; None for all.
        dense_version: the trainer's number for the dense part that belongs to these tables.
        on_progress: called with the size in bytes of each file that has been verified.

    Returns:
        The path.

    Raises:
        CheckpointError: a file is damaged; the message names it.
        ValueError: as in `export_module`; or miss must be given, since the checkpoint does not
            record it.
        OSError: the file cannot be written; the error names it.
    """
    links = chain(resolved(checkpoint))
    folder, manifest = links[-1]
    found = tables_of_chain(links)
    chosen(found, tables)
    verify(folder, on_progress)
    note = f"checkpoint {folder.name}, id {manifest.id}"
    with SnapshotWriter(
        path, step=manifest.step, dense_version=dense_version, note=note
    ) as snapshot:
        write_tables(snapshot, found, rows, miss, tables)
    return Path(path)


def tables_of_module(module: torch.nn.Module) -> list[Exported]:
    """Describe the tables of a module, for `write_tables`.

    Raises:
        RuntimeError: a table is divided among ranks, or on the meta device.
        TypeError: the argument is not a module.
        ValueError: the module has no tables.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    layers = named_tables(unwrapped(module))
    if not layers:
        raise ValueError("export_module: the module has no layer of sparsekit")
    for name, layer in layers.items():
        if layer.world_size > 1:
            raise RuntimeError(
                f"{name}: the table is divided among {layer.world_size} ranks. Save a checkpoint "
                f"(sparsekit.checkpoint.save), and export that: sparsekit serve export CHECKPOINT "
                f"FILE, or export_checkpoint"
            )
    return [of_layer(name, layer) for name, layer in layers.items()]


def of_layer(name: str, layer: EmbeddingTable) -> Exported:
    """Describe this rank's part of a table.

    Raises:
        RuntimeError: the table is on the meta device.
    """
    bring_up_to_date(layer)
    shard = shard_of(name, layer, None, {})
    facts = shard.facts

    def pieces() -> Pieces:
        columns = {column.name: column for column in shard.columns_to_write(None)}
        begin, step = 0, max(1, PIECE // (layer.embedding_vec_size * layer.weight.itemsize))
        for keys in columns["keys"].pieces():
            for part in torch.from_numpy(keys.view(np.int64)).split(step):
                vectors = shard.columns["vectors"][begin : begin + len(part)].cpu()
                begin += len(part)
                if layer.max_norm is not None:
                    vectors = vectors.clone()
                    limit_norms(vectors, torch.arange(len(part)), layer.max_norm, layer.norm_type)
                yield part, vectors

    initializer: Initializer | None = layer.initializer
    why = ""
    if isinstance(initializer, Filled):
        initializer, why = None, f"they come from {initializer}"
    return Exported(
        name, facts["dim"], facts["dtype"], facts["seed"], initializer, why,
        Lookups(**{**facts["lookups"], "limits_norms": False}), False, facts["hash_table"], pieces,
    )  # fmt: skip


def tables_of_chain(links: Chain) -> list[Exported]:
    """Describe the tables of a chain of checkpoints, for `write_tables`."""
    return [_of_chain(links, name) for name in links[-1][1].tables]


def _of_chain(links: Chain, name: str) -> Exported:
    parts = parts_of(links, name)
    table = parts[-1][1]
    why = "the checkpoint does not tell of them"
    if table.initializer:
        why = f"they come from {table.initializer}"

    def pieces() -> Pieces:
        with live_pieces(parts) as found:
            for file, begin, keys, kept in found:
                if len(kept):
                    yield keys[kept], file.read("vectors", begin, len(keys))[kept]

    return Exported(
        name, table.dim, table.dtype, table.seed, initializer_of(table.initializer),
        why, table.lookups, table.counts_kind is not None, table.hash_table,
        pieces,
    )  # fmt: skip


def chosen(found: Sequence[Exported], names: Sequence[str] | None) -> list[Exported]:
    """Return the tables with these names, in this order; all if names is None.

    Raises:
        ValueError: a named table does not exist.
    """
    by_name = {table.name: table for table in found}
    for name in names or ():
        if name not in by_name:
            hint = did_you_mean(name, by_name)
            raise ValueError(f"no table named {name}{hint}; tables: {', '.join(by_name)}")
    return [by_name[name] for name in dict.fromkeys(by_name if names is None else names)]


def write_tables(
    snapshot: SnapshotWriter,
    found: Sequence[Exported],
    rows: Choice | None = None,
    miss: Choice | None = None,
    names: Sequence[str] | None = None,
) -> None:
    """Write tables to a new snapshot; see `export_module` for the arguments.

    Raises:
        ValueError: see `export_module`.
        OSError: the file cannot be written; the error names it.
    """
    tables = chosen(found, names)
    for argument, choice in (("rows", rows), ("miss", miss)):
        if isinstance(choice, Mapping):
            try:
                chosen(tables, list(choice))
            except ValueError as error:
                raise ValueError(f"{argument}: {error}") from None
    added = [_add(snapshot, table, _choice(rows, table), _choice(miss, table)) for table in tables]
    for table, writer in zip(tables, added, strict=True):
        _fill(table, writer)


def _choice(choice: Choice | None, table: Exported) -> str | None:
    return choice.get(table.name) if isinstance(choice, Mapping) else choice


def _add(
    snapshot: SnapshotWriter, table: Exported, rows: str | None, miss: str | None
) -> TableWriter:
    """Add a table to a snapshot, without its rows."""
    told, where = table.lookups, f"table {table.name}"
    if told is not None and told.limits_norms:
        raise ValueError(
            f"{where}: has max_norm, and its rows in a checkpoint may have larger norms; load the "
            f"checkpoint into the module on one rank, and export that (export_module)"
        )
    if miss is None:
        miss = _miss(table)
    if miss not in MISSES:
        raise ValueError(f"{where}: miss must be one of {', '.join(MISSES)}; got {miss!r}")
    fallbacks = told.fallbacks if told is not None and miss == "fallback" else 0
    if miss == "fallback" and not fallbacks:
        raise ValueError(f"{where}: miss='fallback': the table has no rows that keys share")
    numbers = ("constant", 0.0, 0.0)
    if miss == "initial":
        numbers = _numbers(table)
    return snapshot.table(
        table.name,
        table.dim,
        rows=_AS_THEY_ARE.get(table.dtype, "float32") if rows is None else rows,
        miss=miss,
        initializer=numbers,
        seed=table.seed,
        fallbacks=fallbacks,
        combiner="sum" if told is None else told.combiner,
        padding_key=None if told is None else told.padding_key,
    )


def _miss(table: Exported) -> str:
    """Return how the layer's lookups treat a key without a row."""
    if table.lookups is not None:
        return table.lookups.miss
    if table.counts_keys:
        raise ValueError(
            f"table {table.name}: has admission, and the checkpoint does not say what keys without "
            f"a row read (before_admission); pass miss, for example 'zeros'"
        )
    return "initial" if table.hash_table else "error"


def _numbers(table: Exported) -> tuple[str, float, float]:
    """Return the numbers that represent the distribution of initial vectors in files."""
    if table.initializer is None:
        raise ValueError(
            f"table {table.name}: a snapshot cannot give its initial vectors: {table.why_unknown}; "
            f"pass miss='zeros'"
        )
    number, a, b = table.initializer.numbers
    word = next(word for word, each in DISTRIBUTIONS.items() if each == number)
    return word, a, b


def _fill(table: Exported, writer: TableWriter) -> None:
    """Write the rows of a table."""
    told = table.lookups
    shared = 0 if told is None else told.fallbacks
    keeps, have = int(writer.record["num_fallbacks"]) > 0, torch.zeros(shared, dtype=torch.bool)
    for keys, vectors in table.pieces():
        if shared:
            own = keys < FIRST_FALLBACK + shared
            have[keys[own] - FIRST_FALLBACK] = True
            if not keeps:
                keys, vectors = keys[~own], vectors[~own]
        writer.append(keys.numpy(), floats(vectors))
    if keeps and not have.all() and table.initializer is not None:
        # Rows that no lookup in training has read yet are not stored; they have initial vectors.
        keys = (~have).nonzero().squeeze(1) + FIRST_FALLBACK
        vectors = torch.empty(len(keys), table.dim, dtype=getattr(torch, table.dtype), device="cpu")
        table.initializer.write_(vectors, keys, seed=table.seed)
        writer.append(keys.numpy(), floats(vectors))


def floats(vectors: torch.Tensor) -> np.ndarray:
    """Convert vectors to an array; bfloat16, which NumPy does not have, becomes float32."""
    array: np.ndarray = (vectors.float() if vectors.dtype == torch.bfloat16 else vectors).numpy()
    return array
