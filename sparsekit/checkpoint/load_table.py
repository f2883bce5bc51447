"""Checks that a checkpoint's table fits a layer, and loads its rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from ..errors import CheckpointError, TableFullError
from ..memory import zero_
from ..optim.load_state import untouched
from ..optim.row_optimizer import RowOptimizer
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.saved_state import copy_all
from ..tables.scores import KINDS
from ..tables.weight import EmbeddingWeight
from .counts import counts_for
from .encoding import decoded
from .manifest import Table
from .snapshot import owners_crc
from .table_files import (
    Folder,
    Links,
    columns_of,
    key_pieces,
    keys_left_out,
    opened,
    parts_of,
)
from .tensor_file import TensorFile, dtype_name


class TablePlan:
    """Checks that a saved table fits its layer; `load` then loads it.

    The constructor reads all keys and assigns rows to them in a temporary hash table. That table
    needs 21 bytes per row of the layer's capacity, until `load` has copied it.

    Raises:
        CheckpointError: the table does not fit the layer, or a key is invalid.
    """

    optimizer: torch.optim.Optimizer | None = None

    def __init__(self, name: str, layer: EmbeddingTable, links: Links, cast: bool) -> None:
        self.name = name
        self.layer = layer
        self.table = links[-1][1].tables[name]
        self._parts = parts_of(links, name)
        self._same_place = self._is_same_place()
        self._check(links[-1][0], cast)
        rank = layer.rank if self._same_place else None
        self._left_out = keys_left_out(self._parts, rank)
        self._new_table: HashTable | None = None
        if layer.table is not None:
            self._new_table = HashTable(
                layer.table.capacity,
                max_capacity=layer.capacity,
                device=layer.weight.device,
                load_factor=layer.table.load_factor,
                name=layer.name,
            )
        self._place_keys()
        self._counts = counts_for(name, layer, links[-1][0], self.table, self._same_place)

    def _check(self, folder: Folder, cast: bool) -> None:
        layer, table = self.layer, self.table
        dtype = dtype_name(layer.weight.dtype)
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
        scores, life = table.scores, layer.life
        if scores is not None and life is not None and scores.clock > life.score.most_clock:
            raise CheckpointError(
                f"{folder}: table {self.name} has the clock {scores.clock}, and {life.score} in "
                f"the module counts to {life.score.most_clock}"
            )
        rooms = layer.capacity * layer.world_size
        if table.size > rooms and layer.table is not None:
            raise CheckpointError(
                f"{folder}: table {self.name} has {table.size} rows, and {layer.world_size} "
                f"rank(s) with a capacity of {layer.capacity} have room for {rooms}"
            )
        if self._same_place and table.shards[layer.rank].size > layer.capacity:
            raise self._too_many(folder, table.shards[layer.rank].size)

    def _too_many(self, folder: Folder, rows: int) -> CheckpointError:
        layer = self.layer
        return CheckpointError(
            f"{folder}: table {self.name} has {rows} rows for rank {layer.rank}, whose capacity is "
            f"{layer.capacity}; give it a larger one (a layer's max_vocabulary_size_per_gpu, or "
            f"num_embeddings)"
        )

    def _is_same_place(self) -> bool:
        """Return whether this rank owns exactly the rows in its own file, in every checkpoint."""
        layer = self.layer
        return all(
            len(table.shards) == layer.world_size
            and (layer.world_size == 1 or table.placement == layer.placement)
            and table.owners == owners_crc(layer.owners)
            and (layer.table is not None or not table.hash_table)
            for _, table in self._parts
        )

    def _place_keys(self) -> None:
        """Assign rows to the keys of the whole chain, in the order that `load` reads them."""
        folder, rows = self._parts[-1][0], self.layer.capacity * self.layer.world_size
        numbers = torch.empty(0, dtype=torch.bool)  # True for each row read so far
        if self._new_table is None:
            numbers = torch.zeros(rows, dtype=torch.bool)
        for number, (at, part) in enumerate(self._parts):
            count = 0
            for file, begin, keys in self._own_keys(at, part, 8):
                self._check_keys(file, begin, keys)
                self._check_scores(file, begin, len(keys))
                mine = self._own(keys)
                own = keys if mine is None else keys[mine]
                count += len(own)
                if self._new_table is None:
                    numbers[own.cpu()] = True
                    continue
                try:
                    self._new_table.find_or_insert(own)
                except TableFullError as error:
                    raise self._too_many(folder, error.size + error.refused) from None
            found = int(numbers.sum()) if self._new_table is None else len(self._new_table)
            if number == 0 and found != count:
                raise self._wrong_count(at, count, found, "a key is there twice")
        if self._same_place and found != (size := self.table.shards[self.layer.rank].size):
            # With too many keys, the base lacks some that the chain records as changed, not added.
            # With too few, the base already has some that the chain records as added.
            why = "keys are missing in its base"
            if found < size:
                why += ", or one is there twice"
            raise self._wrong_count(folder, size, found, why)
        if self._new_table is not None and self._same_place and self._has_rows():
            self._move_keys(self._new_table)

    def _has_rows(self) -> bool:
        """Return whether the chain records the row of every key that has moved."""
        known = False
        for at, part in self._parts[1:]:
            shard = part.shards[self.layer.rank]
            with opened(at, part, shard) as file:
                if "rows" in file.places:
                    known = True
                elif shard.removed:  # `forget` has rewritten this checkpoint
                    return False
        return known

    def _move_keys(self, table: HashTable) -> None:
        """Move all keys to the rows that they had when they were saved."""
        rank, before = self.layer.rank, 0
        size = max(part.shards[rank].size for _, part in self._parts)
        keys_of_rows = torch.zeros(size, dtype=torch.int64, device=table.buckets.device)
        for at, part in self._parts:
            shard = part.shards[rank]
            with opened(at, part, shard) as file:
                for begin, keys in key_pieces(file, shard.rows, 8):
                    if "rows" in file.places:
                        rows = file.read("rows", begin, len(keys)).to(torch.int64)
                    else:  # new keys are only in the table's last rows
                        first = begin + shard.size - shard.rows
                        rows = torch.arange(first, first + len(keys))
                        keys, rows = keys[rows >= before], rows[rows >= before]
                    if bool(((rows < 0) | (rows >= shard.size)).any()):
                        raise CheckpointError(f"{file.path}: is damaged: a row is out of range")
                    keys_of_rows[rows.to(keys_of_rows.device)] = keys.to(keys_of_rows.device)
            before = shard.size
        moved = keys_of_rows[:before]
        known = bool((table.find(moved) >= 0).all())
        table.clear_()
        table.find_or_insert(moved)
        if not known or len(table) != before:
            raise CheckpointError(f"{at}: table {self.name} is damaged: not every row has a key")

    def _own(self, keys: torch.Tensor) -> torch.Tensor | None:
        """Return the positions of the keys that this rank loads from a piece; None means all."""
        mine = None if self._same_place else self.layer.owned(keys)
        if self._left_out is None:
            return mine
        chosen = keys if mine is None else keys[mine]
        stay = (self._left_out.find(chosen.cpu()) < 0).nonzero().squeeze(1).to(keys.device)
        return stay if mine is None else mine[stay]

    def _wrong_count(self, folder: Folder, rows: int, keys: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"{folder}: table {self.name} should have {rows} rows, and has {keys} keys: {why}"
        )

    def _own_keys(
        self, at: Folder, part: Table, row_bytes: int
    ) -> Iterator[tuple[TensorFile, int, torch.Tensor]]:
        """Yield a table's keys in pieces, from all files that may contain keys that this rank owns.

        Each item consists of a file, the index of the piece's first row in it, and the keys.
        """
        for shard in [part.shards[self.layer.rank]] if self._same_place else part.shards:
            with opened(at, part, shard) as file:
                for begin, keys in key_pieces(file, shard.rows, row_bytes):
                    yield file, begin, keys.to(self.layer.weight.device)

    def _check_keys(self, file: TensorFile, begin: int, keys: torch.Tensor) -> None:
        """Raise CheckpointError if the layer cannot store a key, or another rank owns it."""
        layer = self.layer
        least, most, what = -(2**63), 2**63 - 1, ""
        if layer.table is None:
            most = layer.capacity * layer.world_size - 1
            least, what = (
                0,
                f"no row number in [0, {most + 1}), as the module has them, without a hash table",
            )
        elif layer.key_dtype == torch.int32:
            least, most = -(2**31), 2**31 - 1
            what = "no int32, which the layer takes; make it with key_dtype=torch.int64"
        bad = ((keys < least) | (keys > most)).nonzero() if what else keys[:0, None]
        if not len(bad) and self._same_place and layer.world_size > 1:
            what = f"one of another rank than {layer.rank}, whose file this is"
            ours = torch.zeros(len(keys), dtype=torch.bool, device=keys.device)
            ours[layer.owned(keys)] = True
            bad = (~ours).nonzero()
        if len(bad):
            row = int(bad[0, 0])
            raise CheckpointError(
                f"{file.path}: table {self.name}: key {int(keys[row])} of row {begin + row} is "
                f"{what}"
            )

    def _check_scores(self, file: TensorFile, begin: int, count: int) -> None:
        """Raise CheckpointError if a score is not valid for its kind."""
        if self.table.scores is None:
            return
        clocks = KINDS[self.table.scores.kind].touched(file.read("scores", begin, count))
        bad = (clocks < 0).nonzero()
        if len(bad):
            raise CheckpointError(
                f"{file.path}: table {self.name}: the score of row {begin + int(bad[0, 0])} is "
                f"{int(clocks[bad[0, 0]])}"
            )

    def check_states(self, settings: Mapping[str, Any]) -> None:
        """Raise CheckpointError unless the optimizer, with these settings, has the saved states."""
        optimizer, saved = self.optimizer, self.table.states
        step = decoded(self.table.settings, {}).get("step", 0)
        if isinstance(step, torch.Tensor) and not isinstance(optimizer, RowOptimizer):
            step = step.item()
        counts = (int,) if isinstance(optimizer, RowOptimizer) else (int, float)
        if type(step) not in counts or not 0 <= step < 2**63:
            raise CheckpointError(
                f"table {self.name}: step must be a number >= 0, got {step!r:.80}"
            )
        if isinstance(optimizer, RowOptimizer):
            names = [*optimizer._initial_states(dict(settings))]
            names += ["row_step"] if optimizer._has_row_step(dict(settings)) else []
            single = {"row_step", *optimizer.row_states}
            expected = {name: () if name in single else (self.table.dim,) for name in names}
            if expected != {name: state.shape for name, state in saved.items()}:
                raise CheckpointError(
                    f"table {self.name}: {type(optimizer).__name__} keeps "
                    f"{', '.join(sorted(expected))} for each row, and the checkpoint has "
                    f"{', '.join(f'{n} {list(s.shape)}' for n, s in sorted(saved.items()))}"
                )

    def load(self) -> None:
        """Replace the layer's rows, and the optimizer's states for them."""
        layer, table = self.layer, self.table
        if self._new_table is not None and layer.table is not None:
            layer.table.stop_growing()
            layer.table.reserve(len(self._new_table))
        with layer.rows_changing():
            states = {} if self.optimizer is None else self._fresh_states(self.optimizer)
            columns = {"vectors": layer.weight.detach(), **states}
            if layer.scores is not None:
                zero_(layer.scores)
                if table.scores is not None:
                    columns["scores"] = layer.scores
            if isinstance(layer.weight, EmbeddingWeight):
                layer.weight.moved = False
            layer.checked_modes = set()
            layer.seed.fill_(table.seed)
            if layer.table is not None and self._new_table is not None:
                new = list(self._new_table.tensors())
                if self._new_table.capacity != layer.table.capacity:  # the two have grown unequally
                    own = self._new_table.keys(), self._new_table.hash_seed
                    new = list(layer.table.buffers_of(*own).values())
                copy_all(zip(layer.table.tensors(), new, strict=True))
                self._new_table = None
            elif not self._same_place or table.shards[layer.rank].size < layer.capacity:
                layer.initializer.fill_(
                    layer.weight.detach(), layer.rank, layer.world_size, seed=table.seed
                )
            row_bytes = sum(column.nbytes for column in columns_of(table, 1))
            for number, (folder, part) in enumerate(self._parts):
                for file, begin, keys in self._own_keys(folder, part, row_bytes):
                    self._take(file, begin, keys, columns, first=number == 0)
            if layer.table is not None:
                zero_(layer.weight.detach()[len(layer.table) : layer.reach])
            self._restore_life()
            if self.optimizer is not None:
                self.optimizer.state[layer.weight] = states | self._settings()
                if isinstance(layer.weight, EmbeddingWeight):
                    layer.weight.is_stepped_by(self.optimizer)

    def _restore_life(self) -> None:
        """Restore the clock and the counts; convert scores if the layer uses a different kind."""
        layer, saved = self.layer, self.table.scores
        if layer.life is not None:
            layer.life.counts = self._counts
        if layer.life is None or layer.scores is None or layer.clock is None or saved is None:
            return
        if saved.kind != layer.life.score.name:
            own = layer.scores[: len(cast(HashTable, layer.table))]
            then = KINDS[saved.kind].touched(own)
            own.copy_(layer.life.score.words_of(torch.ones_like(then), then))
        layer.life.restore(layer.clock, saved.clock, saved.set_by_user)

    def _settings(self) -> dict[str, Any]:
        settings = cast(dict[str, Any], decoded(self.table.settings, {}))
        if isinstance(self.optimizer, RowOptimizer):
            step = settings.get("step", 0)
            device = self.layer.weight.device
            settings["step"] = torch.tensor(step, dtype=torch.int64, device=device)
        return settings

    def _fresh_states(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return the states of all rows as they are before the first step."""
        weight = self.layer.weight
        group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
        if isinstance(optimizer, RowOptimizer):
            return untouched(optimizer, weight, group, int(self.table.settings.get("step", 0)))
        # Among torch's optimizers, only Adagrad has states that do not start at zero.
        initial = group.get("initial_accumulator_value", 0.0)
        return {
            name: weight.detach().new_full(
                (len(weight), *state.shape), initial, dtype=getattr(torch, state.dtype)
            )
            for name, state in self.table.states.items()
        }

    def _take(
        self,
        file: TensorFile,
        begin: int,
        keys: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        first: bool,
    ) -> None:
        """Load a piece's rows; ``first`` is true if the piece is from the complete checkpoint."""
        layer = self.layer
        mine = self._own(keys)
        own = keys if mine is None else keys[mine]
        if not len(own):
            return
        if layer.table is None:
            into = own // layer.world_size
        elif first and mine is None:
            # If a row has been given another key since, its new content is in a later file.
            into = torch.arange(begin, begin + len(own), device=keys.device)
        else:
            into = layer.table.find(own)
        start, least = int(into[0]), int(into.min())
        if least < 0:
            raise CheckpointError(f"{file.path}: has changed while it was loaded")
        numbers = torch.arange(start, start + len(into), device=keys.device)
        in_order = torch.equal(into, numbers)
        for name, column in columns.items():
            values = file.read(name, begin, len(keys)).to(keys.device)
            values = values if mine is None else values[mine]
            if in_order:
                column[start : start + len(into)].copy_(values)
            else:
                column[into] = values.to(column.dtype)
