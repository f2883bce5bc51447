"""Collects the contents of a checkpoint: tables, dense tensors, optimizers and other states."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..errors import CheckpointError
from ..nn.wrappers import tables_of
from ..ops.hash_table import SLOTS_PER_BUCKET
from ..tables.admission import size_of
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from .copies import Copies
from .encoding import encoded, scalar
from .evaluation import bring_up_to_date, lookups_of
from .manifest import Scores
from .manifest_file import ROW_DTYPES
from .tensor_file import Column, carried, check_storable, column_of, dtype_name

# Number of rows whose keys are held in memory at a time while a table is written.
_KEYS = 1 << 23
# Number of the hash table's 64-byte buckets to scan at a time.
_BUCKETS = 1 << 17

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Stateful(Protocol):
    """An object that can be saved with a module: a scheduler, a `Trainer`, a reader."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings, in lists, tuples and dicts."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Load a state returned by `state_dict`."""


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Unwrap DistributedDataParallel and torch.compile, which add prefixes to names."""
    within = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module"}
    while name := within.get(type(module).__name__):
        inner = getattr(module, name, None)
        if not isinstance(inner, torch.nn.Module):
            break  # an unrelated class with the same name
        module = inner
    return module


def named_tables(module: torch.nn.Module) -> dict[str, EmbeddingTable]:
    """Return a module's tables by name; a module that is itself a layer is named ``"table"``."""
    return {name or "table": layer for name, layer in tables_of(module).items()}


def listed(optimizer: Optimizers) -> list[torch.optim.Optimizer]:
    """Convert one optimizer, several optimizers or None to a list."""
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)


def owners_crc(owners: torch.Tensor | None) -> int | None:
    """Return the CRC-32 of a map from virtual shards to ranks; None if there is no map."""
    return None if owners is None else zlib.crc32(owners.cpu().numpy().astype("<i2").tobytes())


def dense_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors in a module's state that do not belong to a table, by name."""
    prefixes = tuple(f"{name}." if name else "" for name in tables_of(module))
    named = [*module.named_parameters(), *_persistent_buffers(module)]
    dense = {name: tensor.detach() for name, tensor in named if not name.startswith(prefixes)}
    for name, tensor in dense.items():
        if hasattr(tensor, "device_mesh"):
            raise CheckpointError(
                f"{name}: a parameter that fully_shard has sharded; save the dense part by "
                f"torch.distributed.checkpoint, beside it a sparsekit.checkpoint.DcpState of the "
                f"tables' layers alone"
            )
    return dense


def _persistent_buffers(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


@dataclass
class TableShard:
    """A rank's part of a table, ready to be written.

    Attributes:
        name: name of the table.
        layer: the layer that the table belongs to.
        columns: tensors with one row for each table row, by name; the first one is ``vectors``.
        size: number of rows in use.
        facts: the table's entry in the manifest, without its shards.
        counts: the counts of keys that have not been admitted; None if they are not counted.
    """

    name: str
    layer: EmbeddingTable
    columns: dict[str, torch.Tensor]
    size: int
    facts: dict[str, Any]
    counts: torch.Tensor | None = None

    def identity(self) -> tuple[Any, ...]:
        """Return a value that changes when rows can no longer be compared with saved ones."""
        layer = self.layer
        shapes = [(name, tuple(t.shape), str(t.dtype)) for name, t in self.columns.items()]
        kind = None if self.facts["scores"] is None else self.facts["scores"]["kind"]
        return layer.table is None, layer.rank, layer.world_size, tuple(shapes), kind

    def copy_to(self, copies: Copies) -> None:
        """Replace the columns with copies."""
        wholes: dict[int, torch.Tensor] = {}
        columns = {}
        for name, tensor in self.columns.items():
            # The states of a row are adjacent in memory. Copying them together takes two thirds of
            # the time of separate copies.
            whole = _with_neighbours(tensor)
            if id(whole) not in wholes:
                files = self.layer.files
                wholes[id(whole)] = copies.of(f"{self.name}.{name}", whole, self.size, files)
            columns[name] = wholes[id(whole)]
            if whole is not tensor:
                columns[name] = columns[name].as_strided(
                    (self.size, *tensor.shape[1:]),
                    tensor.stride(),
                    tensor.storage_offset() - whole.storage_offset(),
                )
        self.columns = columns
        if self.layer.table is not None:
            buckets = self.layer.table.buckets
            self._buckets = copies.of(f"{self.name}.buckets", buckets, len(buckets))

    _buckets: torch.Tensor | None = None

    def note(
        self, rank: int, file: str, rows: int, complete: bool, removed: int = 0
    ) -> dict[str, Any]:
        """Describe this rank's part for `manifest_of`."""
        part = {"rank": rank, "file": file, "rows": rows, "size": self.size, "removed": removed}
        if self.counts is not None:
            part["counts"] = size_of(self.facts["scores"]["counts"], self.counts)
        return {**self.facts, "complete": complete, "shard": part}

    def columns_to_write(self, rows: np.ndarray | None) -> list[Column]:
        """Return the columns to write for the given rows, or for all: keys, then contents."""
        count = self.size if rows is None else len(rows)
        keys = Column("keys", torch.int64, (count,), lambda: self._keys(rows))
        others = [
            column_of(name, tensor[: self.size], rows) for name, tensor in self.columns.items()
        ]
        return [keys, *others, *([] if self.counts is None else [column_of("counts", self.counts)])]

    def _keys(self, rows: np.ndarray | None) -> Iterator[np.ndarray]:
        table = self.layer.table
        for begin in range(0, self.size, _KEYS):
            end = min(begin + _KEYS, self.size)
            chosen = None
            if rows is not None:
                chosen = rows[np.searchsorted(rows, begin) : np.searchsorted(rows, end)] - begin
                if not len(chosen):
                    continue
            if table is None:
                keys = np.arange(begin, end, dtype=np.int64) * self.layer.world_size
                keys += self.layer.rank
            else:
                buckets = table.buckets if self._buckets is None else self._buckets
                keys = keys_of_rows(table, buckets, begin, end)
            yield keys.view("<u8") if chosen is None else keys.view("<u8")[chosen]


def _with_neighbours(tensor: torch.Tensor) -> torch.Tensor:
    """Return the contiguous tensor that this tensor is a slice of, or the tensor itself."""
    base = tensor._base
    if base is None or not base.is_contiguous() or base.shape[:1] != tensor.shape[:1]:
        return tensor
    return base if base.stride(0) == tensor.stride(0) else tensor


def keys_of_rows(table: HashTable, buckets: torch.Tensor, begin: int, end: int) -> np.ndarray:
    """Return the int64 keys of rows ``[begin, end)``; allocate memory for these rows only."""
    keys = np.empty(end - begin, dtype=np.int64)
    found = 0
    for first in range(0, len(buckets), _BUCKETS):
        part = carried(buckets[first : first + _BUCKETS].cpu()).view(np.int64)
        rows = part[:, SLOTS_PER_BUCKET:].view(np.int32)[:, :SLOTS_PER_BUCKET]
        here = (rows >= begin) & (rows < end)
        keys[rows[here] - begin] = part[:, :SLOTS_PER_BUCKET][here]
        found += int(here.sum())
    if found != end - begin:
        raise CheckpointError(
            f"{table.name}: the table is damaged: rows {begin} to {end} have {found} keys"
        )
    return keys


class Snapshot:
    """Collects everything that a rank writes, by reference; nothing is copied in advance.

    Args:
        module: a module that contains tables.
        optimizers: the optimizers of the module's parameters.
        state: other objects to save, by name.

    Raises:
        CheckpointError: the state has a value that cannot be saved.
        IndexError, ValueError, TableFullError: see `sparsekit.raise_errors`.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, Stateful],
    ) -> None:
        dense = dense_tensors(module)
        for name, tensor in dense.items():
            check_storable(name, tensor)
        self.dense = {f"module.{name}": tensor for name, tensor in dense.items()}
        self.own: dict[str, torch.Tensor] = {}
        layers = named_tables(module)
        for layer in layers.values():
            bring_up_to_date(layer)
        table_of: dict[torch.Tensor, str] = {layer.weight: name for name, layer in layers.items()}
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        self.optimizers: list[dict[str, Any]] = []
        of_tables: dict[str, tuple[int, dict[str, Any]]] = {}
        for number, optimizer in enumerate(optimizers):
            for parameter, kept in optimizer.state.items():
                if parameter in table_of and kept:
                    of_tables[table_of[parameter]] = number, kept
            self.optimizers.append(self._optimizer(number, optimizer, names, table_of))
        self.shards = [
            shard_of(name, layer, *of_tables.get(name, (None, {})))
            for name, layer in layers.items()
        ]
        self.rank_state = {
            "state": {
                name: encoded(each.state_dict(), f"state.{name}", self.own)
                for name, each in state.items()
            },
            "random": encoded(random_state(), "random", self.own),
        }

    def _optimizer(
        self,
        number: int,
        optimizer: torch.optim.Optimizer,
        names: Mapping[torch.Tensor, str],
        tables: Container[torch.Tensor],
    ) -> dict[str, Any]:
        """Return an optimizer's entry in the manifest, without the states of table rows."""
        parameters = parameter_names(optimizer, names)
        kept = {
            parameters[parameter]: values
            for parameter, values in optimizer.state.items()
            if parameter not in tables
        }
        # Do not call the optimizer's own state_dict, which may copy the states.
        packed = torch.optim.Optimizer.state_dict(optimizer)["param_groups"]
        groups = [
            {
                **{key: value for key, value in saved.items() if key != "params"},
                "params": [parameters[parameter] for parameter in group["params"]],
            }
            for group, saved in zip(optimizer.param_groups, packed, strict=True)
        ]
        prefix = f"optimizers.{number}"
        return {
            "kind": type(optimizer).__name__,
            "groups": encoded(groups, f"{prefix}.groups", self.dense),
            "state": encoded(kept, f"{prefix}.state", self.dense),
        }

    def copy_to(self, copies: Copies) -> None:
        """Copy everything that may change while another thread writes."""
        for shard in self.shards:
            shard.copy_to(copies)
        for tensors in (self.dense, self.own):
            tensors.update({name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()})


def parameter_names(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """Return the names of an optimizer's parameters; ``#i`` if parameter i is not in the module."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {p: names.get(p, f"#{number}") for number, p in enumerate(parameters)}


def shard_of(
    name: str, layer: EmbeddingTable, optimizer: int | None, kept: Mapping[str, Any]
) -> TableShard:
    """Describe a rank's part of a table, whose rows must be up to date.

    Args:
        name: name of the table.
        layer: the layer.
        optimizer: index of the layer's optimizer in the manifest; None if it has none.
        kept: what the optimizer keeps for the layer's weight, by name.

    Raises:
        CheckpointError: the optimizer keeps something that cannot be saved.
    """
    columns = {"vectors": layer.weight.detach()}
    if layer.scores is not None:
        columns["scores"] = layer.scores
    settings: dict[str, Any] = {}
    for key, value in kept.items():
        where = f"{name}.{key}, which the optimizer keeps"
        if isinstance(value, torch.Tensor) and value.dim() and len(value) == layer.capacity:
            check_storable(where, value)
            if dtype_name(value.dtype) not in ROW_DTYPES:
                raise CheckpointError(f"{where}: a table's rows cannot have {value.dtype}")
            columns[key] = value
        elif isinstance(value, torch.Tensor) and not value.dim():
            settings[key] = scalar(value, where)
        else:
            tensors: dict[str, torch.Tensor] = {}
            settings[key] = encoded(value, where, tensors)
            if tensors:
                raise CheckpointError(
                    f"{where}: a tensor of shape {list(next(iter(tensors.values())).shape)} is "
                    f"neither a number nor one for each of the table's {layer.capacity} rows"
                )
    states = {
        key: {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape[1:])}
        for key, tensor in columns.items()
        if key in kept
    }
    facts = {
        "layer": layer.name,
        "dim": layer.embedding_vec_size,
        "dtype": dtype_name(layer.weight.dtype),
        "key_dtype": dtype_name(layer.key_dtype),
        "capacity": (layer.table or layer).capacity,
        "hash_table": layer.table is not None,
        "placement": layer.placement,
        "owners": owners_crc(layer.owners),
        "seed": int(layer.seed),
        "initializer": str(layer.initializer),
        "optimizer": optimizer,
        "states": states,
        "settings": settings,
        "scores": _scores(layer),
        "lookups": asdict(lookups_of(layer)),
    }
    size = layer.capacity if layer.table is None else len(layer.table)
    counts = layer.life.counts.state() if layer.life and layer.life.counts else None
    return TableShard(name, layer, columns, size, facts, counts)


def _scores(layer: EmbeddingTable) -> dict[str, Any] | None:
    """Describe the scores of a table for the manifest."""
    life = layer.life
    if life is None or layer.clock is None:
        return None
    counts = None if life.counts is None else life.counts.kind
    return asdict(Scores(life.score.name, life.now(layer.clock), life.set_by_user, counts))


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of torch's generators for the CPU and, if in use, the current GPU."""
    state = {"cpu": torch.random.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def check_random_state(state: Mapping[str, Any]) -> None:
    """Raise the error that `restore_random_state` would raise for this state."""
    for device, each in state.items():
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{device} is no tensor")
        if device == "cpu" or (device == "cuda" and torch.cuda.is_available()):
            torch.Generator(device).set_state(each)


def restore_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Restore the states of torch's generators; an imported checkpoint has none to restore."""
    if "cpu" not in state:
        return
    torch.random.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
