"""Saves and loads through torch.distributed.checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import CheckpointError
from .dcp_source import FORMAT, NEEDS_LOAD_FROM, NOTES, VERSION, DcpSource, ToSave, stem
from .load import Plan
from .manifest import DENSE, new_id, rank_file, table_file
from .snapshot import Optimizers, Snapshot, Stateful, TableShard, listed, unwrapped
from .together import Together

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader


class DcpState:
    """Wraps a module, its tables and optimizers as a torch.distributed.checkpoint Stateful.

    ``dcp.save({"app": DcpState(model, optimizer)}, checkpoint_id=path)`` saves on any number of
    ranks, and ``dcp.load({"app": DcpState(model, optimizer, load_from=path)}, checkpoint_id=path)``
    loads on any number of ranks. As with `load`, tables may differ in placement or capacity, and
    the module is left unchanged if something does not fit. Other entries in the dict are saved and
    loaded as usual. A rank holds one part of one table in memory at a time. It reads only its own
    part if the placement and the number of ranks are unchanged; otherwise it reads the parts of all
    ranks. There are no checksums. All ranks must call dcp.save and dcp.load together.

    Args:
        module: as for `save`; may be wrapped by DistributedDataParallel. Parameters sharded by
            fully_shard must be saved separately, as another entry in the dict.
        optimizer: as for `save` and `load`.
        state: as for `save` and `load`.
        load_from: the path or StorageReader that is given to dcp.load; None if the object only
            saves. After loading, the object can also save.
        name: the name that the state was saved under ("app" above); required if the checkpoint has
            several DcpStates.
        strict: as for `load`.
        cast: as for `load`.
        process_group: as for `save`.

    Attributes:
        missing: after a load, names in the module that are not in the checkpoint.
        unexpected: after a load, names in the checkpoint that are not in the module.

    Raises:
        CheckpointError: (while saving or loading) for the same reasons as in `save` and `load`; or
            load_from is missing, or is not the checkpoint that dcp.load reads. Errors that
            torch.distributed.checkpoint itself detects are raised as its CheckpointException.
        ValueError: (while saving or loading) a table is distributed over a different set of ranks
            than process_group.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizers = None,
        *,
        state: Mapping[str, Stateful] | None = None,
        load_from: str | os.PathLike[str] | StorageReader | None = None,
        name: str | None = None,
        strict: bool = True,
        cast: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._module = unwrapped(module)
        self._optimizers = listed(optimizer)
        self._state = dict(state or {})
        self._load_from = load_from
        self._name = name
        self._strict, self._cast = strict, cast
        self._group = process_group
        self._source: DcpSource | None = None
        self.missing: list[str] = []
        self.unexpected: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state for torch.distributed.checkpoint to save, or to fill in when loading."""
        together = Together(self._module, self._group)
        load_from = self._load_from
        if load_from is None:
            return self._to_save(together)
        what = f"read {load_from if isinstance(load_from, str | os.PathLike) else 'metadata'}"
        self._source = together.do(what, lambda: DcpSource(load_from, self._name))
        return self._source.to_load()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state: the result of `state_dict`, filled in by torch.distributed.checkpoint."""
        source = self._source
        if source is None:
            raise CheckpointError(NEEDS_LOAD_FROM)
        together = Together(self._module, self._group)
        what = f"load {source}"

        def check() -> Plan:
            source.check_read(state_dict)
            links = [(source, source.manifest)]
            settings = self._strict, self._cast
            return Plan(self._module, together, links, self._optimizers, self._state, *settings)

        plan = together.do(what, check)
        together.do(what, plan.hand_out)
        together.do(what, plan.carry_out)
        self.missing, self.unexpected = plan.missing, plan.unexpected
        self._source = self._load_from = None

    def _to_save(self, together: Together) -> dict[str, Any]:
        what, rank = "save by torch.distributed.checkpoint", together.rank
        snapshot = together.do(what, lambda: Snapshot(self._module, self._optimizers, self._state))
        together.do(f"{what}: {_told(snapshot)}", str)  # the description must be equal on all ranks
        note: dict[str, Any] = {
            "id": together.text_of_first(what, new_id),
            "rank": rank,
            "world_size": together.world_size,
            "tables": {},
            "files": {},
            "rank_state": snapshot.rank_state,
        }
        parts: dict[str, Any] = {
            FORMAT: torch.tensor([VERSION]).as_subclass(ToSave),
            stem(rank_file(rank)): snapshot.own,
        }
        if rank == 0:
            parts[stem(DENSE)] = snapshot.dense
            note["optimizers"] = snapshot.optimizers
        keys = together.do(what, lambda: [_keys(shard) for shard in snapshot.shards])
        for number, shard in enumerate(snapshot.shards):
            file = table_file(number, rank)
            note["tables"][shard.name] = shard.note(rank, file, shard.size, complete=True)
            columns = {name: tensor[: shard.size] for name, tensor in shard.columns.items()}
            counts = {} if shard.counts is None else {"counts": shard.counts}
            parts[stem(file)] = {"keys": keys[number], **columns, **counts}
        text = bytearray(json.dumps(note, allow_nan=False).encode())
        parts[NOTES] = {f"{rank:04d}": torch.frombuffer(text, dtype=torch.uint8)}
        return parts


def _told(snapshot: Snapshot) -> str:
    """Return a string that describes the tables, so that ranks can compare them."""
    return ", ".join(
        f"{shard.name}.{key} {value}"
        for shard in snapshot.shards
        for key, value in shard.facts.items()
        if key != "layer"
    )


def _keys(shard: TableShard) -> torch.Tensor:
    """Return the keys of the rows in a rank's part of a table."""
    keys, done = np.empty(shard.size, dtype=np.int64), 0
    for piece in shard.columns_to_write(None)[0].pieces():
        keys[done : done + len(piece)] = piece.view(np.int64)
        done += len(piece)
    return torch.from_numpy(keys)
