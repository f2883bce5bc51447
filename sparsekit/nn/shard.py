"""One process's share of a table: its tensors, its rows, and how they are saved and loaded."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from ..distributed import Exchange, exchange_of
from ..distributed.sharded import Sharded
from ..memory import prefer_huge_pages
from ..table import HashTable
from .init import resolve
from .load import entries_of, load, own_entries, own_vectors, refuse_lost_values
from .options import TableOptions
from .own_shard import OwnShard
from .request import Request
from .weight import EmbeddingWeight

_names = itertools.count()


# What is passed to them has been checked; their Python forms check it again.
_unique = torch.ops.sparsekit.unique.default
_gather_rows = torch.ops.sparsekit.gather_rows.default


class Found(NamedTuple):
    """What a table has for the keys of a call."""

    rows: torch.Tensor  # int64 [u] of the distinct keys, rising; -1 = unseen, in evaluation
    some_missing: bool  # whether there are rows of -1
    vectors: torch.Tensor  # [u, dim] of the distinct keys, in the order of rows
    inverse: torch.Tensor  # int64 [n] which of them each key is


class _OfThisProcess:
    """A process group, which a copy of the layer shares and a pickled layer goes without."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfThisProcess:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfThisProcess, (None,)


class ShardedTable(torch.nn.Module, Sharded):
    """One process's share of an embedding table; base class of the layers.

    Its parameters are those of `DistributedEmbedding`. State: ``weight`` [capacity, dim],
    ``table`` (a `HashTable`, absent without the hash table), ``seed`` int64 [1] and ``shard`` int64
    [2], rank and world size.
    """

    weight: EmbeddingWeight
    seed: torch.Tensor
    shard: torch.Tensor

    def __init__(self, options: TableOptions) -> None:
        super().__init__()
        name = options.name
        self.name = f"{type(self).__name__}_{next(_names)}" if name is None else name
        # While keys are being inserted: the table's size before. What is interrupted in between is
        # finished by whoever reads or writes the table next, in a copy too.
        self._unfinished: torch.Tensor | None = None
        # Modes (training or not) in which the weight has been looked at before the first key.
        self._looked_at: set[bool] = set()
        options = options.checked(self.name)
        device = cast(torch.device, options.device)
        self._process_group = _OfThisProcess(options.process_group)
        exchange = exchange_of(self.process_group, device)
        self.rank = exchange.rank if exchange else 0
        self.world_size = exchange.world_size if exchange else 1
        # Whether a rank sends each of its keys once. Off, it sends them as they come, which is for
        # measurements.
        self.dedupe = True
        # How pooled vectors come from other ranks; see DistributedEmbedding.
        self.strategy = "all_to_all"
        self.capacity = options.max_vocabulary_size_per_gpu
        self.embedding_vec_size = options.embedding_vec_size
        self.key_dtype = options.key_dtype
        self.initializer = resolve(self.name, options.embedding_initializer)
        self.padding_key = options.padding_key
        self.on_full = options.on_full
        self.gradient_reduction = options.gradient_reduction
        self.register_buffer("seed", torch.tensor([options.seed], device=device))
        # Which part of the table this is, so that none is loaded in place of another.
        shard = torch.tensor([self.rank, self.world_size], device=device)
        self.register_buffer("shard", shard)
        shape = (self.capacity, self.embedding_vec_size)
        weight = torch.empty(shape, dtype=options.dtype, device=device)
        self.weight = EmbeddingWeight(prefer_huge_pages(weight).zero_())
        if options.use_hashtable:
            self.table: HashTable | None = HashTable(self.capacity, device=device, name=self.name)
            self.table.rank = self.rank
        else:
            self.table = None
            keys = torch.arange(self.capacity, device=device) * self.world_size + self.rank
            self.initializer.write_(self.weight.data, keys, seed=int(self.seed))

    def __setattr__(self, name: str, value: Any) -> None:
        # torch's fully_shard, which does not go on if this raises.
        if name == "weight" and hasattr(value, "device_mesh"):
            raise RuntimeError(
                f"{self.name}: fully_shard would take the table apart, which is sharded already; "
                f"pass it ignored_params={{the weights of embedding layers}}"
            )
        super().__setattr__(name, value)

    def request(self, *inputs: Any) -> Request:
        """Check the input of a call. Changes nothing."""
        raise NotImplementedError

    def sharded_state(self) -> Iterable[str]:
        """See `Sharded`: all that a table consists of, but not what a subclass has added."""
        return own_entries(self)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """Over whose ranks the table is sharded; None is torch.distributed's default group."""
        return self._process_group.group

    def process_exchange(self) -> Exchange | None:
        """`exchange`, whether the layer fits it or not."""
        return exchange_of(self.process_group, self.weight.device)

    @property
    def exchange(self) -> Exchange | None:
        """The way to the other ranks, or None where there are none; see `check_ranks`."""
        exchange = self.process_exchange()
        self.check_ranks(exchange)
        return exchange

    def check_ranks(self, exchange: Exchange | None) -> None:
        """Raise RuntimeError if the layer was made for other ranks than those of its exchange."""
        rank, world_size = (exchange.rank, exchange.world_size) if exchange else (0, 1)
        if (rank, world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"{self.name}: made on rank {self.rank} of {self.world_size}, whose part of the "
                f"table it holds, but this is rank {rank} of {world_size}"
            )

    def plan(self) -> str:
        """What all ranks must agree on before they look something up.

        Raises:
            RuntimeError: the table has been overwritten by that of another rank.
        """
        # In one piece, since on a device each reading waits for it.
        seed, *shard = torch.cat((self.seed, self.shard)).tolist()
        if shard != [self.rank, self.world_size]:
            raise RuntimeError(
                f"{self.name}: this is rank {self.rank} of {self.world_size}, but holds the table "
                f"of rank {shard[0]} of {shard[1]}: something has copied a model over the others', "
                f"tables included. Wrap models with sparsekit.distributed.wrap_ddp, and load the "
                f"tables again on all ranks"
            )
        return (
            f"{self.name} (dim {self.embedding_vec_size}, {self.weight.dtype}, "
            f"{'training' if self.training else 'evaluation'}, "
            f"{'hash table' if self.table is not None else 'row numbers'}"
            f"{', gradients' if self.weight.requires_grad and torch.is_grad_enabled() else ''}"
            f", {self.strategy}, {self.gradient_reduction}, seed {seed}, "
            f"{self.initializer}, padding_key {self.padding_key}"
            f"{'' if self.table is not None else f', {self.capacity} rows'})"
        )

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
        entries = entries_of(state_dict, prefix)
        if entries:
            try:
                load(self, entries, local_metadata.get("assign_to_params_buffers", False))
            except (TypeError, ValueError) as error:
                error_messages.append(str(error))
            # torch has nothing left to do here, nor in the table.
            state_dict.update({prefix + name: own for name, own in own_entries(self).items()})
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)
        if entries and not isinstance(self.weight, EmbeddingWeight):
            # torch.__future__.set_swap_module_params_on_conversion makes it a plain parameter.
            self.weight = EmbeddingWeight(self.weight.data, self.weight.requires_grad)

    def _catch_up(self, rows: torch.Tensor | None = None) -> None:
        # There may be another kind of tensor in place of the weight, under functional_call for one.
        weight = self.weight
        if isinstance(weight, EmbeddingWeight) and weight.before_read is not None:
            weight.catch_up(rows)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._finish_insertion()
        self._catch_up()
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.world_size > 1:
            name = f"{prefix}shard"
            destination[name] = OwnShard.of(destination[name], self.name)

    def _apply(self, *args: Any, **kwargs: Any) -> ShardedTable:
        # While the optimizer's state is still where the weight is, and of its dtype.
        self._catch_up()
        return super()._apply(*args, **kwargs)

    def _rows(self, keys: torch.Tensor) -> torch.Tensor:
        """Rows of distinct int64 keys of this rank; new ones are inserted in training, else -1."""
        if self.table is None:
            rows = keys // self.world_size
            self._catch_up(rows)
            return rows
        if self.training:
            return self._insert(self.table, keys)
        self._finish_insertion()
        if False not in self._looked_at:
            refuse_lost_values(self)
            self._looked_at.add(False)
        rows = self.table.find(keys)
        self._catch_up(rows)
        return rows

    def _insert(self, table: HashTable, keys: torch.Tensor) -> torch.Tensor:
        self._finish_insertion()
        if True not in self._looked_at:
            refuse_lost_values(self)
        # A module's own way to set an attribute takes longer than the clone.
        self.__dict__["_unfinished"] = table.size.clone()
        rows, status = table.find_or_insert_with_status(keys)
        # A row may have moved before it had a key; what it has missed is not its new vector's.
        self._catch_up(rows)
        self.initializer.write_(self.weight.data, keys, rows, status, seed=int(self.seed))
        self.__dict__["_unfinished"] = None
        self._looked_at.add(True)
        return rows

    @torch.no_grad()
    def assign_(self, keys: torch.Tensor, vectors: torch.Tensor) -> None:
        """Give keys these vectors, for instance pretrained ones; absent keys are inserted.

        With several ranks, call it with the same keys on all: each keeps those that it owns. States
        of optimizers stay as they are.

        Args:
            keys: int64 or int32 ``[n]``, distinct.
            vectors: floating point ``[n, dim]``.

        Raises:
            TypeError, ValueError: a wrong dtype or shape, repeated keys, or another device.
            IndexError: a key out of range, without the hash table.
            TableFullError: more new keys than free rows; nothing has been changed.
        """
        keys, vectors = own_vectors(self, keys, vectors)
        rows = self._rows(keys) if self.table is None else self._insert(self.table, keys)
        self.weight.index_copy_(0, rows, vectors.to(self.weight.dtype))

    def _finish_insertion(self) -> None:
        """Give keys their initial vectors if the call that inserted them was interrupted."""
        if self._unfinished is None or self.table is None:
            return
        before, size = int(self._unfinished), len(self.table)
        if 0 <= before < size:
            rows = torch.arange(before, size, device=self.weight.device)
            self._catch_up(rows)
            keys = self.table.keys()[before:]
            self.initializer.write_(self.weight.data, keys, rows, seed=int(self.seed))
        self._unfinished = None

    def look_up(self, keys: torch.Tensor) -> Found:
        """Rows and vectors of keys ``[n]`` of this rank; new ones are inserted in training.

        A coalesced gradient has its rows sorted. Sorting them here, where the inverse can follow
        cheaply, saves a pass over the gradients.
        """
        unique, inverse, _ = _unique(keys)
        unique = unique.to(torch.int64)
        rows, order = self._rows(unique).sort()
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order), device=order.device)
        vectors, some_missing = self._vectors(unique[order], rows)
        return Found(rows, some_missing, vectors, position[inverse])

    def _vectors(self, keys: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Vectors of rows, for keys with row -1 their initial ones, and whether there are such."""
        with torch._C._AutoDispatchBelowAutograd():
            vectors = _gather_rows(self.weight.detach(), rows)
        if self.training or self.table is None:
            return vectors, False
        missing = (rows < 0).nonzero().squeeze(1)
        if len(missing) == 0:
            return vectors, False
        self.initializer.write_(vectors, keys[missing], missing, seed=int(self.seed))
        return vectors, True

    def extra_repr(self) -> str:
        """Name, shape and the settings that matter."""
        rows = f", rows={len(self.table)}" if self.table is not None else ", use_hashtable=False"
        return (
            f"name={self.name!r}, capacity={self.capacity}, dim={self.embedding_vec_size}, "
            f"dtype={self.weight.dtype}{rows}"
        )
