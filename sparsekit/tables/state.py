"""Holds the tensors of a table, and saves and loads their state."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import ops
from ..distributed import Exchange
from ..distributed.sharded import Sharded
from ..memory import first_rows, parts_written, untouched_zeros, with_length
from ..ops._checks import FLOATING, ROW_DTYPES
from ..ops.bucketize import VIRTUAL_SHARDS
from . import saved_state as saved
from .admission import ExactCounts, Sketch, counts_of
from .hash_table import HashTable
from .initializers import Constant, Initializer
from .kept_tensors import release_kept
from .life import RowLife
from .own_shard import OwnShard, exchange_ref
from .owners import check_ranks_of, shared
from .room import RowsWithRoom
from .weight import SEEN_ROWS, EmbeddingWeight, free_rows_hold, own_writes

_INT64 = (torch.int64,)
# Name of the entry, in a state, for the counts of keys that have not been admitted.
_COUNTS = "counts"


class TableTensors(RowsWithRoom, Sharded):
    """Base of `EmbeddingTable`: its tensors, loaded all together or not at all.

    Attributes:
        name: name of the layer; error messages begin with it.
        rank, world_size: which share of the table this is, and how many shares there are.
        capacity: number of rows in this share.
        embedding_vec_size: length of a vector.
        placement: how keys are placed on ranks.
        weight: ``[capacity, dim]``.
        table: maps keys to rows; None without the hash table.
        seed: int64 ``[1]``, the seed of the initial vectors.
        shard: int64 ``[2]``, rank and world size.
        owners: int16 ``[65536]``, the rank of each virtual shard; None if keys are placed without
            this map.
        life: the `RowLife` with the rows' clock and counts; None for a table without scores.
        scores: int64 ``[capacity]``, the score of each row; None for a table without scores.
        clock: int64 ``[1]``, the clock of the scores.
        checked_modes: modes (inserting or not) that the weight has been checked for.
    """

    name: str
    rank: int
    world_size: int
    capacity: int
    embedding_vec_size: int
    key_dtype: torch.dtype
    placement: str
    weight: EmbeddingWeight
    table: HashTable | None
    seed: torch.Tensor
    shard: torch.Tensor
    owners: torch.Tensor | None
    life: RowLife | None
    scores: torch.Tensor | None
    clock: torch.Tensor | None
    checked_modes: set[bool]
    initializer: Initializer

    def process_exchange(self) -> Exchange | None:
        """Return the exchange with the other ranks; None without other ranks."""
        raise NotImplementedError

    def sharded_state(self) -> Iterable[str]:
        """Return the names of a table's tensors, except those that a subclass adds."""
        return [*own_entries(self), *_counts_of(self)]

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        """Apply the optimizer steps that these rows, or all rows, have missed."""
        # The weight may be another kind of tensor, for example under functional_call.
        weight = self.weight
        if isinstance(weight, EmbeddingWeight):
            weight.catch_up(rows)

    def rows_changing(self) -> AbstractContextManager[None]:
        """Return a context in which rows may get other keys; see `RowsOf.changing`."""
        return nullcontext() if self.table is None else self.table.rows_of.changing()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_messages: list[str],
    ) -> None:
        rest = strict, missing_keys, unexpected_keys, error_messages
        release_kept()  # so that torch can swap tensors
        entries = entries_of(state_dict, prefix)
        if entries:
            try:
                load(self, entries, local_metadata.get("assign_to_params_buffers", False))
            except (TypeError, ValueError) as error:
                error_messages.append(str(error))
            # Leave nothing for torch to load into the layer or the hash table.
            state_dict.update({prefix + name: own for name, own in own_entries(self).items()})
            # Leave out entries that torch does not know.
            unknown = (_COUNTS,) if self.scores is not None else (_COUNTS, "scores", "clock")
            for name in unknown:
                state_dict.pop(f"{prefix}{name}", None)
        with own_writes([self.weight]):
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if entries and not isinstance(self.weight, EmbeddingWeight):
            # Restore the type: torch.__future__.set_swap_module_params_on_conversion turns the
            # weight into a plain parameter.
            self.weight = EmbeddingWeight(self.weight.data, self.weight.requires_grad)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self.catch_up()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, counts in _counts_of(self).items():
            destination[f"{prefix}{name}"] = counts
        rows = self.rows_of_state(keep_vars)
        if rows is not None:
            for name in {f"{prefix}weight", f"{prefix}scores"} & destination.keys():
                destination[name] = first_rows(destination[name], rows)
        if self.world_size > 1:
            name = f"{prefix}shard"
            exchange = exchange_ref(self.process_exchange())
            destination[name] = OwnShard.of(destination[name], self.name, exchange)


def entries_of(state_dict: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return a state's entries for a layer and its table, by the layer's names."""
    own = ("weight", "seed", "shard", "owners", "scores", "clock", _COUNTS)
    names = (name.removeprefix(prefix) for name in state_dict)
    return saved.entries(state_dict, prefix, (n for n in names if n in own or n[:6] == "table."))


def own_entries(layer: TableTensors) -> dict[str, torch.Tensor]:
    """Return the tensors of a layer and its table, by their names in a state."""
    own = {"weight": layer.weight, "seed": layer.seed, "shard": layer.shard}
    for name in ("owners", "scores", "clock"):
        if (buffer := getattr(layer, name)) is not None:
            own[name] = buffer
    if layer.table is not None:
        own |= {f"table.{name}": buffer for name, buffer in layer.table.named_buffers()}
    return own


def _counts_of(layer: TableTensors) -> dict[str, torch.Tensor]:
    """Return the counts of keys that have not been admitted, by their name in a state."""
    life = layer.life
    if life is None or life.counts is None or layer.weight.is_meta:
        return {}
    return {_COUNTS: life.counts.state()}


def load(layer: TableTensors, entries: dict[str, Any], assign: bool) -> None:
    """Load the entries of a saved state: all of them, or none if one does not fit.

    A hash table's state may have been saved at another capacity, if its rows fit.

    Args:
        layer: the layer.
        entries: the state's entries, named as in `own_entries`, and any other entries of a table.
        assign: whether the saved weight replaces the layer's, as in load_state_dict.

    Raises:
        TypeError, ValueError: the state is damaged, incomplete or from another layer; the layer is
            unchanged.
    """
    saved.refuse_meta(layer.name, None if assign else layer.weight.device)
    if entries.keys() == {"weight"}:
        raise ValueError(
            f"{layer.name}: the state has no seed, only weight, as that of a torch.nn.Embedding, "
            f"whose row i is the vector of id i; so call assign(torch.arange(len(weight)), weight)"
        )
    shard = [0, 1]  # states from older versions have no shard
    if "shard" in entries:
        shard = saved.entry(layer.name, entries, "shard", _INT64, (2,)).tolist()
    if shard != [layer.rank, layer.world_size]:
        raise ValueError(
            f"{layer.name}: the state is that of rank {shard[0]} of {shard[1]}, whose keys and "
            f"rows do not belong to rank {layer.rank} of {layer.world_size}; each rank saves its "
            f"own state and loads it again"
        )
    of_table = {
        name.removeprefix("table."): value
        for name, value in entries.items()
        if name.startswith("table.")
    }
    if layer.table is None and of_table:
        raise ValueError(f"{layer.name}: the state has a hash table, which there is not here")
    rows = layer.capacity if layer.table is None else None
    dtypes = ROW_DTYPES if assign else FLOATING
    weight = saved.entry(layer.name, entries, "weight", dtypes, (rows, layer.embedding_vec_size))
    seed = saved.entry(layer.name, entries, "seed", _INT64, (1,))
    owners = _owners(layer, entries)
    device = weight.device if assign else layer.weight.device
    table = {} if layer.table is None else layer.table.restored(of_table, device)
    if table and int(table["size"]) > len(weight):
        raise ValueError(
            f"{layer.name}: the state is damaged: {int(table['size'])} rows are in use, but weight "
            f"has {len(weight)}"
        )
    if table and layer.key_dtype == torch.int32:
        _refuse_wide_keys(layer.name, table)
    life = _life(layer, entries, len(weight), device)
    # Apply missed optimizer steps, since they belong to the rows that are about to be replaced.
    layer.catch_up()
    layer.checked_modes = set()
    counts = _loaded_counts(layer, entries, device)
    with layer.rows_changing():
        if assign:
            _replace(layer, weight, seed, owners, table, life)
        else:
            _copy(layer, weight, seed, owners, table, life)
        if layer.life is not None:
            layer.life.counts = counts
            layer.life.forget_expiry()


def _refuse_wide_keys(name: str, table: dict[str, torch.Tensor]) -> None:
    keys = ops.hash_table_keys(table["buckets"], table["hash_seed"], table["size"])
    wide = (keys != keys.to(torch.int32)).nonzero()
    if len(wide):
        row = int(wide[0, 0])
        raise ValueError(
            f"{name}: key {int(keys[row])} of row {row} is no int32, which the layer takes; make "
            f"it with key_dtype=torch.int64"
        )


def _life(
    layer: TableTensors, entries: dict[str, Any], rows: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return new buffers ``scores`` and ``clock``; zeros for a state without them.

    Raises:
        TypeError, ValueError: the entries are damaged, or one of them is missing.
    """
    if layer.scores is None:
        return {}
    made = {
        "scores": untouched_zeros([layer.capacity], torch.int64, device, layer.reach_on(device)),
        "clock": torch.zeros(1, dtype=torch.int64, device=device),
    }
    if not entries.keys().isdisjoint(made):
        scores = saved.entry(layer.name, entries, "scores", _INT64, (rows,))
        clock = saved.entry(layer.name, entries, "clock", _INT64, (1,))
        if int(clock) < 0:
            raise ValueError(f"{layer.name}: the state is damaged: its clock is {int(clock)}")
        count = min(rows, layer.reach)
        made["scores"][:count] = scores[:count]
        made["clock"].copy_(clock)
    return made


def _loaded_counts(
    layer: TableTensors, entries: dict[str, Any], device: torch.device
) -> ExactCounts | Sketch | None:
    """Return the counts in a state, or empty counts if the state has none.

    Raises:
        TypeError, ValueError: the entry is damaged, or has the wrong kind of counts.
    """
    if layer.life is None or layer.life.counts is None:
        return None
    counts = counts_of(layer.life.admission, device)
    if counts is not None and _COUNTS in entries:
        dtype, shape = counts.form
        counts.load(saved.entry(layer.name, entries, _COUNTS, (dtype,), shape).to(device))
    return counts


def _owners(layer: TableTensors, entries: dict[str, Any]) -> torch.Tensor | None:
    """Return the owner map in a state, or None if the layer has no map."""
    if ("owners" in entries) != (layer.owners is not None):
        if layer.world_size == 1:
            raise ValueError(
                f"{layer.name}: the state has owners, though it is that of one rank alone"
            )
        raise ValueError(
            f"{layer.name}: the state was saved with placement="
            f"{'hash' if 'owners' in entries else 'modulo'!r}"
            f"{'' if 'owners' in entries else ', or by a version that had no other'}, and this "
            f"layer has placement={layer.placement!r}, where keys live on other ranks; make the "
            f"layer with the placement of the state"
        )
    if layer.owners is None:
        return None
    owners = saved.entry(layer.name, entries, "owners", (torch.int16,), (VIRTUAL_SHARDS,))
    check_ranks_of(f"{layer.name}: in the state", owners, layer.world_size)
    return owners


def _copy(
    layer: TableTensors,
    weight: torch.Tensor,
    seed: torch.Tensor,
    owners: torch.Tensor | None,
    table: dict[str, torch.Tensor],
    life: dict[str, torch.Tensor],
) -> None:
    rows, reach = min(len(weight), layer.capacity), layer.reach
    if layer.grows:
        rows = min(rows, int(table["size"]))
    unused = layer.weight[rows : max(rows, reach)].detach()
    # Copy the weight first, since this copy may fail for lack of memory.
    pairs = [
        (layer.weight[:rows].detach(), weight[:rows]),
        (unused, unused.new_zeros(()).expand_as(unused)),
        (layer.seed, seed),
    ]
    own = layer.owners
    if owners is not None and own is not None and not torch.equal(owners.to(own.device), own):
        # Other layers may share the map, so write to a copy.
        layer.owners = own.clone()
        pairs.append((layer.owners, owners))
    pairs += [(layer.get_buffer(name)[:reach], new[:reach]) for name, new in life.items()]
    if layer.table is not None:
        pairs += [(layer.table.get_buffer(name), new) for name, new in table.items()]
    saved.copy_all(pairs)


def _replace(
    layer: TableTensors,
    weight: torch.Tensor,
    seed: torch.Tensor,
    owners: torch.Tensor | None,
    table: dict[str, torch.Tensor],
    life: dict[str, torch.Tensor],
) -> None:
    if layer.files is not None:
        weight = layer.files.holding(weight)
    elif len(weight) != layer.capacity:
        weight = with_length(weight[: layer.reach], layer.capacity, layer.reach_on(weight.device))
    else:
        weight = weight.contiguous()
    parameter = EmbeddingWeight(weight, layer.weight.requires_grad)
    parameter.files = layer.files
    shard = torch.tensor([layer.rank, layer.world_size], device=weight.device)
    buffers = {"seed": seed.to(weight.device), "shard": shard, **life}
    if owners is not None:
        owners = owners.to(weight.device).contiguous()
        buffers["owners"] = shared(owners, layer.world_size)
    pairs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (layer._parameters, {"weight": parameter}),
        (layer._buffers, buffers),
    ]
    if layer.table is not None:
        parameter.note_version()  # else `belongs_to` would check rows against the old keys
        parameter.belongs_to(layer.table)
        pairs.append((layer.table._buffers, table))
    saved.replace_all(pairs)
    parameter.follow_keys()


def refuse_lost_values(layer: TableTensors, written: bool) -> None:
    """Raise RuntimeError if rows without a key have values, which new keys would overwrite.

    Args:
        layer: a layer with a hash table.
        written: whether its weight has been written to since the last check; if not, rows with keys
            are not checked.
    """
    weight = layer.weight.detach()
    keys = 0 if layer.table is None else len(layer.table)
    used, zeros_initially = weight[:keys], layer.initializer == Constant(0.0)
    what, undo = "", "call reset_parameters(), which drops keys too"
    if keys == 0:
        reached = weight[: layer.reach]
        held = any(bool(reached[part].any()) for part in parts_written(reached))
        if held or (written and not zeros_initially):
            what = "before any of its rows had a key"
    elif free_rows_hold(weight, keys):
        what = f"past its {keys} keys, in rows that have none"
        undo = f"write zeros to weight[{keys}:] under torch.no_grad()"
    # Usually the first rows are enough to decide.
    elif written and not (zeros_initially or used[:SEEN_ROWS].any() or used.any()):
        what = "as zeros, rows without a key too"
    # Do not raise if an optimizer has moved all rows, including rows without a key.
    if what and not getattr(layer.weight, "moved", False):
        raise RuntimeError(
            f"{layer.name}: weight was written to {what}, and a new key starts from the layer's "
            f"initializer. For other initial values give the layer an embedding_initializer, such "
            f"as sparsekit.nn.Constant(7.0); for pretrained vectors of known keys call "
            f"assign(keys, vectors). To drop what was written, {undo}"
        )
    if keys and written:
        layer.weight.note_version()
