"""Loading: any number of ranks read what any other number has written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..nn.shard import ShardedTable
from ..nn.weight import EmbeddingWeight
from ..optim.row_optimizer import RowOptimizer
from .encoding import decoded
from .folder import chain, resolved
from .manifest import DENSE, MANIFEST, Manifest, Table, check_files
from .snapshot import (
    Optimizers,
    Stateful,
    dense_tensors,
    listed,
    named_tables,
    owners_crc,
    parameter_names,
    restore_random_state,
    unwrapped,
)
from .tensor_file import PIECE, TensorFile
from .together import Together

Chain = Sequence[tuple[Path, Manifest]]


@dataclass(frozen=True)
class Loaded:
    """What `load` has found.

    Attributes:
        path: folder of the checkpoint.
        step: that `save` was given.
        missing: names that the module has and the checkpoint has not; with strict none.
        unexpected: names that the checkpoint has and the module has not; with strict none.
    """

    path: Path
    step: int | None
    missing: list[str]
    unexpected: list[str]


def load(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizers = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load what `save` has written, on as many ranks as there are now.

    Tables may have another placement, another capacity if their rows fit, and a hash table or none;
    each rank reads the rows that it owns, piece by piece. All that can be found out beforehand is,
    and the module is as it was if something does not fit or a file is damaged. On as many ranks as
    have saved, and with tables made alike, rows get their old places, and torch's random numbers go
    on as they would have, so that training goes on bit for bit on the CPU. With several ranks it is
    a collective.

    Args:
        module: made as the one that was saved.
        path: a checkpoint, or a folder of them, of which the latest whole one is taken.
        optimizer: as for `save`, of the same kinds with the same parameters; their settings become
            those that were saved. None: only the module's tensors are loaded.
        state: name -> objects that take over what those of the same name have saved; on another
            number of ranks all take rank 0's.
        strict: whether names of tables and tensors must be the same on both sides.
        cast: whether vectors and dense tensors of another dtype are rounded to the module's.
        verify: whether to compare the checksums of all files before; without it, damage may be
            loaded.
        process_group: as for `save`.

    Raises:
        CheckpointError: on all ranks: a file is missing or damaged, a table is missing, extra or of
            another dim or dtype, or has more rows than fit, or the optimizers are others.
        ValueError: a table of other ranks than those of process_group.
    """
    module = unwrapped(module)
    together = Together(module, process_group)
    what = f"load {path}"
    found = Path(together.text_of_first(what, lambda: os.fspath(resolved(path))))
    links = together.do(what, lambda: chain(found))
    newest = links[-1][1]

    def check() -> _Plan:
        if verify:
            _verify(links, together.rank, together.world_size)
        return _Plan(module, links, listed(optimizer), state or {}, strict, cast)

    plan = together.do(what, check)
    together.do(what, plan.carry_out)
    return Loaded(found, newest.step, plan.missing, plan.unexpected)


def _verify(links: Chain, rank: int, world_size: int) -> None:
    """Check this rank's part of the files; sizes of all."""
    for folder, manifest in links:
        check_files(folder, manifest, contents=False)
        names = sorted(manifest.files)[rank::world_size]
        mine = {name: manifest.files[name] for name in names}
        check_files(folder, replace(manifest, files=mine))


class _Plan:
    """What is to be loaded, all of it checked."""

    def __init__(
        self,
        module: torch.nn.Module,
        links: Chain,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, Stateful],
        strict: bool,
        cast: bool,
    ) -> None:
        self._links = links
        self._folder, self._manifest = links[-1]
        self._state = state
        layers = named_tables(module)
        for layer in layers.values():
            layer.refuse_meta()
        with TensorFile(self._folder / DENSE) as file:
            dense = {name: file.read(name) for name in file.places}
        saved = {name[len("module.") :] for name in dense if name.startswith("module.")}
        mine = {*layers, *dense_tensors(module)}
        theirs = {*self._manifest.tables, *saved}
        self.missing, self.unexpected = sorted(mine - theirs), sorted(theirs - mine)
        if strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self._folder}: does not fit the module: "
                f"{_some('it lacks', self.missing)}{_some('it has besides', self.unexpected)}"
                f"pass strict=False to load what both have"
            )
        self._tables = [
            _TablePlan(name, layer, links, cast)
            for name, layer in layers.items()
            if name in self._manifest.tables
        ]
        self._dense = self._match_dense(dense_tensors(module), dense, cast)
        self._optimizers = self._match_optimizers(module, layers, optimizers, dense)
        own = self._rank_state(next(iter(layers.values())).rank if layers else _rank())
        unknown = sorted(state.keys() - own["state"].keys())
        if unknown and strict:
            raise CheckpointError(
                f"{self._folder}: has no state of {', '.join(unknown)}, but of "
                f"{', '.join(own['state']) or 'nothing'}"
            )
        self._own = own

    def _match_dense(
        self, mine: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], cast: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for name, tensor in mine.items():
            value = saved.get(f"module.{name}")
            if value is None:
                continue
            if value.shape != tensor.shape:
                raise CheckpointError(
                    f"{self._folder}: {name} has shape {list(value.shape)}, and "
                    f"{list(tensor.shape)} in the module"
                )
            if value.dtype != tensor.dtype and not cast:
                raise CheckpointError(
                    f"{self._folder}: {name} is {value.dtype}, and {tensor.dtype} in the module; "
                    f"pass cast=True to round it"
                )
            pairs.append((tensor, value))
        return pairs

    def _match_optimizers(
        self,
        module: torch.nn.Module,
        layers: Mapping[str, ShardedTable],
        optimizers: Sequence[torch.optim.Optimizer],
        tensors: Mapping[str, torch.Tensor],
    ) -> list[_OptimizerPlan]:
        saved = self._manifest.optimizers
        if optimizers and len(optimizers) != len(saved):
            raise CheckpointError(
                f"{self._folder}: has the state of {len(saved)} optimizers, and {len(optimizers)} "
                f"were given"
            )
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        loaded: dict[torch.Tensor, _TablePlan] = {plan.layer.weight: plan for plan in self._tables}
        try:
            return [
                _OptimizerPlan(
                    self._folder, number, optimizer, saved[number], names, tensors, loaded
                )
                for number, optimizer in enumerate(optimizers)
            ]
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{self._folder / MANIFEST}: is damaged: optimizers: {error!r:.200}"
            ) from error

    def _rank_state(self, rank: int) -> dict[str, Any]:
        """What this rank has saved of its own, or rank 0 if other ranks have saved."""
        same = self._manifest.world_size == _world_size(self._tables)
        self._same_ranks = same
        number = rank if same else 0
        with TensorFile(self._folder / f"rank-{number:04d}.safetensors") as file:
            tensors = {name: file.read(name) for name in file.places}
        values = decoded(self._manifest.ranks[number], tensors)
        if not isinstance(values.get("state"), dict) or not isinstance(values.get("random"), dict):
            raise CheckpointError(f"{self._folder}: ranks[{number}] lacks state or random")
        return cast(dict[str, Any], values)

    @torch.no_grad()
    def carry_out(self) -> None:
        """Change the module, the optimizers and other objects."""
        for tensor, value in self._dense:
            tensor.copy_(value)
        for table in self._tables:
            table.layer._catch_up()  # what is due belongs to the rows that go
        for optimizer in self._optimizers:
            optimizer.load()
        for table in self._tables:
            table.load()
        for name, each in self._state.items():
            if name in self._own["state"]:
                each.load_state_dict(self._own["state"][name])
        if self._same_ranks:
            restore_random_state(self._own["random"])


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world_size(tables: Sequence[_TablePlan]) -> int:
    if tables:
        return tables[0].layer.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def _some(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what} {', '.join(names[:5])}{more}; "


class _OptimizerPlan:
    """An optimizer whose saved state has been found to fit."""

    def __init__(
        self,
        folder: Path,
        number: int,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        names: Mapping[torch.Tensor, str],
        tensors: Mapping[str, torch.Tensor],
        tables: Mapping[torch.Tensor, _TablePlan],
    ) -> None:
        self._optimizer = optimizer
        kind = type(optimizer).__name__
        if saved.get("kind") != kind:
            raise CheckpointError(
                f"{folder}: optimizer {number} is {saved.get('kind')}, and {kind} was given"
            )
        groups = decoded(saved.get("groups"), tensors)
        states = decoded(saved.get("state"), tensors)
        own_names = parameter_names(optimizer, names)
        numbers = {name: i for i, name in enumerate(own_names.values())}
        own = [sorted(own_names[p] for p in g["params"]) for g in optimizer.param_groups]
        theirs = [sorted(group["params"]) for group in groups]
        if own != theirs:
            differs = sorted(set(itertools.chain(*own)) ^ set(itertools.chain(*theirs)))
            raise CheckpointError(
                f"{folder}: optimizer {number}, {kind}, has other parameters: "
                f"{', '.join(differs[:5]) or 'in other groups'}"
            )
        self._loaded = {
            "state": {numbers[name]: values for name, values in states.items()},
            "param_groups": [
                {**of_group, "params": [numbers[own_names[p]] for p in group["params"]]}
                for of_group, group in zip(groups, optimizer.param_groups, strict=True)
            ],
        }
        for parameter in own_names:
            plan = tables.get(parameter)
            if plan is not None and plan.table.optimizer == number:
                plan.optimizer = optimizer

    def load(self) -> None:
        self._optimizer.load_state_dict(self._loaded)


class _TablePlan:
    """A layer and where its rows are."""

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, name: str, layer: ShardedTable, links: Chain, cast: bool) -> None:
        self.name = name
        self.layer = layer
        self.table = links[-1][1].tables[name]
        # Of what is complete and what has changed since.
        self._parts = [(folder, manifest.tables[name]) for folder, manifest in links
                       if name in manifest.tables]  # fmt: skip
        complete = [i for i, (_, table) in enumerate(self._parts) if table.complete]
        self._parts = self._parts[complete[-1] :]
        self._check(links[-1][0], cast)

    def _check(self, folder: Path, cast: bool) -> None:
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
                    for begin, keys in _key_pieces(file, shard.rows):
                        if layer.table is None:
                            bad = ((keys < 0) | (keys >= rows)).nonzero()
                            if len(bad):
                                raise CheckpointError(
                                    f"{folder / shard.file}: table {self.name}: key "
                                    f"{int(keys[bad[0, 0]])} of row {begin + int(bad[0, 0])} is no "
                                    f"row number in [0, {rows}), as the module has them, without a "
                                    f"hash table"
                                )
                        if number == 0:
                            count += len(layer.owned(keys.to(layer.weight.device)))
        return count

    def load(self) -> None:
        """Replace the layer's rows, and the optimizer's states of them."""
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
            fresh = optimizer.untouched_states(weight, int(self.table.settings.get("step", 0)))
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
        for begin, keys in _key_pieces(file, rows, self._row_bytes()):
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


def opened(folder: Path, table: Table, name: str, rows: int) -> TensorFile:
    """A shard's file, after a look whether it has what the manifest says."""
    file = TensorFile(folder / name)
    expected = {"keys": ("int64", (rows,)), "vectors": (table.dtype, (rows, table.dim))}
    expected |= {key: (state.dtype, (rows, *state.shape)) for key, state in table.states.items()}
    for key, (dtype, shape) in expected.items():
        place = file.places.get(key)
        found = place and (str(place.dtype).removeprefix("torch."), place.shape)
        if found != (dtype, shape):
            file.__exit__(None, None, None)
            raise CheckpointError(
                f"{folder / name}: is damaged: {key} should be {dtype} {list(shape)}, and is "
                f"{found}"
            )
    return file


def _key_pieces(
    file: TensorFile, rows: int, row_bytes: int = 8
) -> Iterator[tuple[int, torch.Tensor]]:
    """Keys piece by piece, with the number of the first."""
    step = max(1, PIECE // row_bytes)
    for begin in range(0, rows, step):
        yield begin, file.read("keys", begin, min(step, rows - begin))
