"""Loads saved occurrence counts of keys that have not been admitted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from .. import ops
from ..errors import CheckpointError
from ..tables.admission import ExactCounts, Sketch, counts_of, largest_counts
from ..tables.embedding_table import EmbeddingTable
from .manifest import Shard, Table
from .snapshot import owners_crc
from .table_files import Folder, opened


def counts_for(
    name: str, layer: EmbeddingTable, folder: Folder, table: Table, same_place: bool
) -> ExactCounts | Sketch | None:
    """Return a layer's key counts as they were saved; None if the layer does not count keys.

    An exact count goes to the rank that owns its key, and is added to the rank's sketch if there is
    one. If sketches were saved and keys may have changed owners, each rank gets the sketches'
    elementwise maximum.

    Args:
        name: name of the table.
        layer: the layer that will load the table.
        folder: the checkpoint.
        table: the table's entry in the manifest.
        same_place: whether this rank owns exactly the keys in its own file.

    Raises:
        CheckpointError: a file is damaged.
    """
    life = layer.life
    device = layer.weight.device
    counts = None if life is None else counts_of(life.admission, device)
    if counts is None or table.counts_kind is None:
        return counts
    saved = _read(folder, table, [table.shards[layer.rank]] if same_place else table.shards)
    if table.counts_kind == Sketch.kind:
        if isinstance(counts, Sketch):
            counts.load_all(saved)
        else:
            warnings.warn(
                f"sparsekit: {folder}: table {name} has counted keys in a sketch, which does not "
                f"know them, and {life and life.admission} counts from 0",
                stacklevel=2,
            )
        return counts
    state = torch.cat(saved)
    mine = layer.owned(state[:, 0].contiguous())
    if len(mine) < len(state) and same_place:
        raise CheckpointError(f"{folder}: table {name} is damaged: a count is in a wrong file")
    state = state[mine].to(device)
    if isinstance(counts, Sketch):
        counts.add(state[:, 0].contiguous(), state[:, 1], 0)
        return counts
    counts.load(state)
    if len(counts.index) < len(state):
        raise CheckpointError(f"{folder}: table {name} is damaged: a key has two counts")
    return counts


def counts_on_ranks(
    folder: Folder, table: Table, world_size: int, owners: torch.Tensor | None
) -> list[torch.Tensor]:
    """Return a saved table's counts, redistributed over ``world_size`` ranks; [] if it has none.

    Args:
        folder: the checkpoint.
        table: the table's entry in the manifest.
        world_size: number of ranks.
        owners: the rank of each virtual shard; None if keys are placed without such a map.

    Raises:
        CheckpointError: a file is damaged.
    """
    if table.counts_kind is None:
        return []
    saved = _read(folder, table, table.shards)
    if table.counts_kind == Sketch.kind:
        same_place = world_size == len(saved) and table.owners == owners_crc(owners)
        return saved if same_place else [largest_counts(saved)] * world_size
    state = torch.cat(saved)
    _, here, order = ops.bucketize(state[:, 0].contiguous(), world_size, owners)
    return list(state[order].split(here.tolist()))


def _read(folder: Folder, table: Table, shards: Sequence[Shard]) -> list[torch.Tensor]:
    """Read and check the counts in these shards' files."""
    states = []
    for shard in shards:
        with opened(folder, table, shard) as file:
            state = file.read("counts")
        if table.counts_kind == Sketch.kind:
            width = shard.counts
            sound = width == table.shards[0].counts and width > 0 and width & (width - 1) == 0
            sound = sound and int(state.min()) >= 0
        else:  # each key has a count >= 1 and a clock >= 0
            sound = not bool((state[:, 1:] < torch.tensor([1, 0])).any())
        if not sound:
            raise CheckpointError(f"{file.path}: is damaged: a count is out of range")
        states.append(state)
    return states
