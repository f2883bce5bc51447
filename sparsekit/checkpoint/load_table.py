"""One table of a checkpoint: whether it fits a layer, and its rows into that layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch

from ..errors import CheckpointError
from ..nn.shard import ShardedTable
from ..nn.weight import EmbeddingWeight
from ..optim.load_state import untouched
from ..optim.row_optimizer import RowOptimizer
from .encoding import decoded
from .manifest import Manifest, Table
from .snapshot import owners_crc
from .tensor_file import PIECE, TensorFile

Chain = Sequence[tuple[Path, Manifest]]


class Source(Protocol):
    """What has the tensors of a checkpoint in place of a folder's files."""

    def file(self, name: str) -> TensorFile:
        """That of a name in the manifest."""


Folder = Path | Source
Links = Sequence[tuple[Folder, Manifest]]
AnyFolder = TypeVar("AnyFolder", bound=Folder)


class TablePlan:
    """A layer and where its rows are."""

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, name: str, layer: ShardedTable, links: Links, cast: bool) -> None:
        self.name = name
        self.layer = layer
        self.table = links[-1][1].tables[name]
        self._parts = parts_of(links, name)
        self._check(links[-1][0], cast)

    def _check(self, folder: Folder, cast: bool) -> None:
        layer, table = self.layer, self.table
        dtype = str(layer.weight.dtype).removeprefix("torch.")
        if table.dim != layer.embedding_vec_size:
            raise CheckpointError(
                f"{folder}: table {self.name} has dim {table.dim}, and {layer.embedding_vec_size} "
                f"in the module"
            )
        if table.dtype != dtype and not cast:
            raise CheckpointError(
                f"{folder}: table {self.name} is {table.dtype}, and {dtype} in the module; pass "
                f"cast=True to round it"
            )
        rooms = layer.capacity * layer.world_size
        if table.size > rooms and layer.table is not None:
            raise CheckpointError(
                f"{folder}: table {self.name} has {table.size} rows, and {layer.world_size} "
                f"rank(s) with a capacity of {layer.capacity} have room for {rooms}"
            )
        size = table.shards[layer.rank].size if self._same_place() else self._count_own()
        if size > layer.capacity:
            raise CheckpointError(
                f"{folder}: table {self.name} has {size} rows for rank {layer.rank}, whose "
                f"capacity is {layer.capacity}; give it a larger one (a layer's "
                f"max_vocabulary_size_per_gpu, or num_embeddings)"
            )

    def _same_place(self) -> bool:
        """Whether this rank's rows are those of the file of its number, in all parts."""
        layer = self.layer
        return all(
            len(table.shards) == layer.world_size
            and (layer.world_size == 1 or table.placement == layer.placement)
            and table.owners == owners_crc(layer)
            and (layer.table is not None or not table.hash_table)
            for _, table in self._parts
        )

    def _count_own(self) -> int:
        """Rows for this rank; of a chain those of the complete part."""
        layer, count = self.layer, 0
        rows = layer.capacity * layer.world_size
        for number, (folder, table) in enumerate(self._parts):
            for shard in table.shards:
                with opened(folder, table, shard.file, shard.rows) as file:
                    for begin, keys in key_pieces(file, shard.rows):
                        if layer.table is None:
                            bad = ((keys < 0) | (keys >= rows)).nonzero()
                            if len(bad):
                                raise CheckpointError(
                                    f"{file.path}: table {self.name}: key "
                                    f"{int(keys[bad[0, 0]])} of row {begin + int(bad[0, 0])} is no "
                                    f"row number in [0, {rows}), as the module has them, without a "
                                    f"hash table"
                                )
                        if number == 0:
                            count += len(layer.owned(keys.to(layer.weight.device)))
        return count

    def load(self) -> None:
        """Replace the layer's rows, and the optimizer's states of them."""
        with self.layer.rows_changing():
            self._load()

    def _load(self) -> None:
        layer, table = self.layer, self.table
        columns: dict[str, torch.Tensor] = {"vectors": layer.weight.detach()}
        if self.optimizer is not None:
            columns |= self._fresh_states(self.optimizer)
        if isinstance(layer.weight, EmbeddingWeight):
            layer.weight.moved = False
        layer.looked_at = set()
        layer.seed.fill_(table.seed)
        if layer.table is not None:
            layer.table.clear_()
        elif self._count(layer) < layer.capacity or not self._same_place():
            layer.initializer.fill_(
                layer.weight.detach(), layer.rank, layer.world_size, seed=table.seed
            )
        for folder, part in self._parts:
            shards = [part.shards[layer.rank]] if self._same_place() else part.shards
            for shard in shards:
                with opened(folder, part, shard.file, shard.rows) as file:
                    self._take(file, shard.rows, columns)
        if layer.table is not None:
            if self._same_place() and len(layer.table) != table.shards[layer.rank].size:
                raise CheckpointError(
                    f"{self._parts[-1][0]}: table {self.name} should have "
                    f"{table.shards[layer.rank].size} rows, and has {len(layer.table)}: a key is "
                    f"there twice"
                )
            layer.weight.detach()[len(layer.table) :].zero_()
        if self.optimizer is not None:
            kept = {name: value for name, value in columns.items() if name != "vectors"}
            self.optimizer.state[layer.weight] = kept | self._settings()
            if isinstance(layer.weight, EmbeddingWeight):
                layer.weight.is_stepped_by(self.optimizer)

    def _count(self, layer: ShardedTable) -> int:
        return self.table.shards[layer.rank].size if self._same_place() else 0

    def _settings(self) -> dict[str, Any]:
        settings = cast(dict[str, Any], decoded(self.table.settings, {}))
        if isinstance(self.optimizer, RowOptimizer):
            step = settings.get("step", 0)
            device = self.layer.weight.device
            settings["step"] = torch.tensor(step, dtype=torch.int64, device=device)
        return settings

    def _fresh_states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """New states of all rows, as of those that no step has touched."""
        weight = self.layer.weight
        if isinstance(optimizer, RowOptimizer):
            group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
            fresh = untouched(optimizer, weight, group, int(self.table.settings.get("step", 0)))
        else:
            # Of torch's optimizers Adagrad alone has states that do not begin with zeros.
            initial = optimizer.defaults.get("initial_accumulator_value", 0.0)
            fresh = {
                name: weight.detach().new_full(
                    (len(weight), *state.shape), initial, dtype=getattr(torch, state.dtype)
                )
                for name, state in self.table.states.items()
            }
        lacking = sorted(fresh.keys() ^ self.table.states.keys())
        if lacking:
            raise CheckpointError(
                f"table {self.name}: {type(optimizer).__name__} keeps {', '.join(sorted(fresh))} "
                f"for each row, and the checkpoint has {', '.join(sorted(self.table.states))}"
            )
        return fresh

    def _take(self, file: TensorFile, rows: int, columns: Mapping[str, torch.Tensor]) -> None:
        layer = self.layer
        device = layer.weight.device
        everything = self._same_place()
        for begin, keys in key_pieces(file, rows, self._row_bytes()):
            keys = keys.to(device)
            mine = None if everything else layer.owned(keys)
            own = keys if mine is None else keys[mine]
            if not len(own):
                continue
            into = own // layer.world_size if layer.table is None else _inserted(layer, own)
            first = int(into[0])
            in_order = bool((into == torch.arange(first, first + len(into), device=device)).all())
            for name, column in columns.items():
                values = file.read(name, begin, len(keys)).to(device)
                values = values if mine is None else values[mine]
                if in_order:
                    column[first : first + len(into)].copy_(values)
                else:
                    column[into] = values.to(column.dtype)

    def _row_bytes(self) -> int:
        states = (
            getattr(torch, state.dtype).itemsize * (state.shape[0] if state.shape else 1)
            for state in self.table.states.values()
        )
        return self.table.dim * self.layer.weight.dtype.itemsize + sum(states)


def _inserted(layer: ShardedTable, keys: torch.Tensor) -> torch.Tensor:
    return cast(Any, layer.table).find_or_insert(keys)


def parts_of(
    links: Sequence[tuple[AnyFolder, Manifest]], name: str
) -> list[tuple[AnyFolder, Table]]:
    """Of a chain, where a table is complete, and what has changed of it since."""
    parts = [(at, manifest.tables[name]) for at, manifest in links if name in manifest.tables]
    complete = [i for i, (_, table) in enumerate(parts) if table.complete]
    return parts[complete[-1] :]


def file_in(folder: Folder, name: str) -> TensorFile:
    """A file of a checkpoint."""
    return TensorFile(folder / name) if isinstance(folder, Path) else folder.file(name)


def opened(folder: Folder, table: Table, name: str, rows: int) -> TensorFile:
    """A shard's file, after a look whether it has what the manifest says."""
    file = file_in(folder, name)
    expected = {"keys": ("int64", (rows,)), "vectors": (table.dtype, (rows, table.dim))}
    expected |= {key: (state.dtype, (rows, *state.shape)) for key, state in table.states.items()}
    for key, (dtype, shape) in expected.items():
        place = file.places.get(key)
        found = place and (str(place.dtype).removeprefix("torch."), place.shape)
        if found != (dtype, shape):
            file.__exit__(None, None, None)
            raise CheckpointError(
                f"{file.path}: is damaged: {key} should be {dtype} {list(shape)}, and is {found}"
            )
    return file


def key_pieces(
    file: TensorFile, rows: int, row_bytes: int = 8
) -> Iterator[tuple[int, torch.Tensor]]:
    """Keys piece by piece, with the number of the first."""
    step = max(1, PIECE // row_bytes)
    for begin in range(0, rows, step):
        yield begin, file.read("keys", begin, min(step, rows - begin))
