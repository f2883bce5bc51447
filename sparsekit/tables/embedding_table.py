"""One process's share of a table: its tensors, its rows, and its saved state."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.nn import Parameter

from .. import ops
from .._compiling import refuse_script
from ..distributed import Exchange, exchange_of
from ..distributed.world import group_of
from ..memory import untouched_zeros
from ..ops._checks import accumulate_dtype
from .counter import Counter
from .fallback import Fallback
from .hash_table import HashTable
from .init_function import resolve
from .initializers import Constant, Initializer
from .life import new_life
from .options import TableOptions, drawn_seed
from .owners import CodeOfMap, even_map
from .rows_of import RowsOf
from .state import TableTensors, refuse_lost_values
from .weight import EmbeddingWeight

_names = itertools.count()

# Counts attribute changes in all tables.
table_changes = Counter()


class _OfThisProcess:
    """Holds a layer's process group: copies of the layer share it, and pickling drops it."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group

    def __deepcopy__(self, memo: dict[int, Any]) -> _OfThisProcess:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _OfThisProcess, (None,)


def _place(group: dist.ProcessGroup | None, device: torch.device) -> tuple[int, int]:
    """Return rank and world size; create the exchange between ranks unless the device is meta."""
    if device.type == "meta":
        ranks = group_of(group)
        return (ranks.rank(), ranks.size()) if ranks else (0, 1)
    exchange = exchange_of(group, device)
    return (exchange.rank, exchange.world_size) if exchange else (0, 1)


class EmbeddingTable(TableTensors):
    """One process's share of an embedding table: its storage, and which rank owns which key.

    It takes the parameters of `DistributedEmbedding`. Its state has ``weight`` [capacity, dim];
    ``table``, a `HashTable`, unless use_hashtable is False; ``seed`` int64 [1]; ``shard`` int64
    [2], the rank and world size; and, on several ranks with ``placement="hash"``, ``owners`` int16
    [65536], the rank of each virtual shard (see `sparsekit.ops.bucketize`). Layers may share the
    tensor ``owners``, so do not write to it: to change it, assign another tensor, the same on all
    ranks, before there are any keys.
    """

    # Maximum p-norm of rows that are read, and p; see `Embedding`.
    max_norm: float | None = None
    norm_type: float = 2.0
    # True if the caller has given the name; a generated name includes the size of the table.
    _named: bool = True
    # Counts attribute changes, so that a cache can tell whether its content is still valid.
    changes: int = 0

    def __init__(self, options: TableOptions) -> None:
        super().__init__()
        name = options.name
        self._named = name is not None
        if name is None:  # the size in the name tells layers apart in errors
            told = f"{options.max_vocabulary_size_per_gpu} rows of {options.embedding_vec_size}"
            name = f"{type(self).__name__}_{next(_names)} ({told.removeprefix('None ')})"
        self.name = name
        self.checked_modes = set()
        options = options.checked(self.name)
        device = cast(torch.device, options.device)
        self._process_group = _OfThisProcess(options.process_group)
        self.rank, self.world_size = _place(self.process_group, device)
        # True if a rank sends each distinct key only once. False sends repeated keys too, for
        # benchmarks.
        self.dedupe = True
        # How this rank gets pooled vectors from other ranks; see DistributedEmbedding.
        self.strategy = "all_to_all"
        # Dtype for exchanging vectors and gradients between ranks; None means the weight's dtype.
        self.wire_dtype = options.wire_dtype
        # Limit on the distinct keys that a call may request from another rank; see
        # DistributedEmbedding.
        self.max_keys_per_rank = options.max_keys_per_rank
        # True if new keys get rows in training; see DistributedEmbedding.
        self.insert = options.insert
        rows = cast(int, options.max_vocabulary_size_per_gpu)
        self.capacity = options.max_capacity or rows
        self.embedding_vec_size = options.embedding_vec_size
        self.key_dtype = options.key_dtype
        use_hashtable = options.use_hashtable
        self.initializer = resolve(
            self.name,
            options.embedding_initializer,
            (rows * self.world_size, self.embedding_vec_size),
            use_hashtable,
        )
        self.padding_key = options.padding_key
        self.on_full = options.on_full
        self.life = new_life(self.name, options, self.capacity * self.world_size)
        self.gradient_reduction = options.gradient_reduction
        # Seed of the initial vectors; if it is None, each reset of the vectors draws a new seed.
        self._given_seed = options.seed
        self.register_buffer("seed", torch.empty(1, dtype=torch.int64, device=device))
        # Identifies this part of the table, so that another part cannot be loaded instead.
        self.register_buffer("shard", torch.empty(2, dtype=torch.int64, device=device))
        self.placement = cast(str, options.placement)
        placed = options.placement == "hash" and self.world_size > 1
        self.register_buffer("owners", even_map(self.world_size, device) if placed else None)
        self._code_of_map = CodeOfMap()
        # Scores of rows, and the clock that lookups in training advance; see `tables.scores`.
        scored, first = self.life is not None, rows if self.grows else None
        for buffer, size in (("scores", self.capacity), ("clock", 1)):
            new = untouched_zeros([size], torch.int64, device, first) if scored else None
            self.register_buffer(buffer, new)
        self.weight = self.new_weight(options, rows)
        self.table = None
        if use_hashtable:
            self.table = HashTable(rows, device=device, name=self.name, max_capacity=self.capacity)
            self.table.rank = self.rank
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Reset the table: drop all keys, or write initial vectors if there is no hash table.

        A layer with neither a name nor a seed draws a new seed. Owners and optimizer states stay
        unchanged. Ranks do not communicate here, so call this method on all of them.
        """
        self.catch_up()
        weight = self.weight
        if isinstance(weight, EmbeddingWeight):
            weight.moved = False
        self.checked_modes = set()
        if weight.is_meta:
            return
        seed = drawn_seed() if self._given_seed is None else self._given_seed
        self.seed.fill_(seed)
        for place, value in enumerate((self.rank, self.world_size)):
            self.shard[place] = value
        if self.life is not None:
            self.life.forget_counts(weight.device)
        if self.table is not None:
            self.table.clear_()
        else:
            self.initializer.fill_(weight, self.rank, self.world_size, seed=seed)

    def __setattr__(self, name: str, value: Any) -> None:
        # Raise an error if torch's fully_shard sets a DTensor as the weight.
        if name == "weight" and hasattr(value, "device_mesh"):
            raise RuntimeError(
                f"{self.name}: fully_shard would take the table apart, which is sharded already; "
                f"pass it ignored_params="
                f"set(sparsekit.distributed.ignored_parameters(model).values())"
            )
        super().__setattr__(name, value)
        self.count_change()
        if name in ("weight", "table"):
            self._tie()

    def count_change(self) -> None:
        """Count a change to attributes, tensors, or the hash table's capacity."""
        self.__dict__["changes"] = self.changes + 1
        table_changes.next()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"life": None, "files": None, **state})
        for name in ("scores", "clock"):  # a layer pickled by an older version lacks them
            self._buffers.setdefault(name, None)
        self._tie()

    def _tie(self) -> None:
        """Make the weight and the hash table refer to each other, once both exist."""
        table = getattr(self, "table", None)
        if isinstance(self.weight, EmbeddingWeight):
            self.weight.files = self.files
        if table is not None:
            table.rows_of = RowsOf(self)
            if isinstance(self.weight, EmbeddingWeight):
                self.weight.belongs_to(table)

    def __prepare_scriptable__(self) -> None:
        # torch.jit.script calls this on every module of a model, to get a scriptable substitute.
        refuse_script(self.name)

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The group that the table is sharded over; None means torch's default group."""
        return self._process_group.group

    def process_exchange(self) -> Exchange | None:
        """Return the exchange, without checking that it has the layer's rank and world size."""
        self.refuse_meta()
        return exchange_of(self.process_group, self.weight.device)

    @property
    def exchange(self) -> Exchange | None:
        """The exchange with the other ranks, checked by `check_ranks`; None if there are none."""
        exchange = self.process_exchange()
        self.check_ranks(exchange)
        return exchange

    def refuse_meta(self) -> None:
        """Raise RuntimeError if the layer is on the meta device."""
        if self.weight.is_meta:
            raise RuntimeError(
                f"{self.name}: the layer is on meta, and has no vectors to look up; call "
                f"to_empty(device=...), or load a state with assign=True"
            )

    def check_ranks(self, exchange: Exchange | None) -> None:
        """Raise RuntimeError unless the exchange has the rank and world size of the layer."""
        rank, world_size = (exchange.rank, exchange.world_size) if exchange else (0, 1)
        if (rank, world_size) != (self.rank, self.world_size):
            raise RuntimeError(
                f"{self.name}: made on rank {self.rank} of {self.world_size}, whose part of the "
                f"table it holds, but this is rank {rank} of {world_size}; make layers after "
                f"torch.distributed has been initialised"
            )

    @property
    def gradient_divisor(self) -> int:
        """Divisor for gradients summed over ranks: the world size for means, as in DDP, else 1."""
        return self.world_size if self.gradient_reduction == "mean" else 1

    @property
    def dtype_on_wire(self) -> torch.dtype:
        """Dtype for exchanging vectors and their gradients between ranks."""
        return self._on_wire(self.weight.dtype)

    @property
    def sum_dtype_on_wire(self) -> torch.dtype:
        """Dtype for exchanging sums of vectors between ranks."""
        return self._on_wire(accumulate_dtype(self.weight.dtype))

    def _on_wire(self, dtype: torch.dtype) -> torch.dtype:
        return min(dtype, self.wire_dtype or dtype, key=lambda one: one.itemsize)

    @property
    def inserts(self) -> bool:
        """Return whether a lookup gives rows to new keys."""
        return self.training and self.insert

    @property
    def inserts_all(self) -> bool:
        """Return whether a lookup gives rows to all new keys."""
        return self.inserts and self.admits_all

    @property
    def admits_all(self) -> bool:
        """Return whether new keys need no admission."""
        return self.life is None or self.life.admission is None

    @property
    def absent(self) -> Initializer:
        """The distribution of vectors for keys without a row."""
        zeros = self.life is not None and self.life.before_admission == "zero"
        return Constant(0.0) if zeros else self.initializer

    @property
    def fallback(self) -> Fallback | None:
        """The rows that keys share until they are admitted; None if there are none."""
        before = None if self.life is None else self.life.before_admission
        return before if isinstance(before, Fallback) else None

    def owned(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the positions of the keys that this rank owns, in ascending order."""
        _, counts, order = ops.bucketize(keys, self.world_size, self.owners)
        return order.split(counts.tolist())[self.rank]

    def _placed(self) -> str:
        """Return the placement as text; ranks with different owner maps get different texts."""
        if self.owners is None:
            return "modulo"
        return f"hash {self._code_of_map.of(self.name, self.owners, self.world_size)}"

    def signature(self, seed: int, shard: list[int], gradients: bool) -> str:
        """Return the facts that all ranks must agree on before a lookup, as text.

        Args:
            seed: the value in the tensor ``seed``.
            shard: the values in the tensor ``shard``.
            gradients: whether the lookup will have a backward.

        Raises:
            RuntimeError: the table has been overwritten by another rank's table.
            ValueError: an entry of owners is not a rank.
        """
        if shard != [self.rank, self.world_size]:
            raise RuntimeError(
                f"{self.name}: this is rank {self.rank} of {self.world_size}, but holds the table "
                f"of rank {shard[0]} of {shard[1]}: something has copied a model over the others', "
                f"tables included. Wrap models with sparsekit.distributed.wrap_ddp, and load the "
                f"tables again on all ranks"
            )
        return (
            f"{self._short_name} (dim {self.embedding_vec_size}, {self.weight.dtype}, "
            f"{'training' if self.training else 'evaluation'}, "
            f"{'hash table' if self.table is not None else 'row numbers'}, "
            f"placement {self._placed()}{', gradients' if gradients else ''}"
            f", {self.strategy}, {self.gradient_reduction}, {self.dtype_on_wire} between ranks, "
            f"seed {seed}{self._hint_at_seed()}, max_keys_per_rank {self.max_keys_per_rank}, "
            f"{'inserting' if self.insert else 'insert=False'}, {self.life or ''}"
            f"{self.initializer}, padding_key {self.padding_key}"
            f"{'' if self.max_norm is None else f', max_norm {self.max_norm} of {self.norm_type}'}"
            f"{'' if self.table is not None else f', {self.capacity} rows'})"
        )

    @property
    def _short_name(self) -> str:
        """The name without the number of rows, which may differ from rank to rank."""
        return self.name if self._named else self.name.partition(" (")[0]

    def _hint_at_seed(self) -> str:
        """Return advice for an error message that reports different seeds on the ranks."""
        if self._given_seed is not None:
            return ""
        return " drawn by torch, for want of a name; name the layer to have one on all ranks"

    def _apply(self, fn: Callable[[Any], Any], *args: Any, **kwargs: Any) -> EmbeddingTable:
        # Apply missed steps while the optimizer's state still fits the weight's device and dtype.
        self.catch_up()
        owners, was_meta = self.owners, self.weight.is_meta
        vars(self.weight).pop("written_rows", None)  # its marks would miss assignments to `data`
        with self.rows_in_reach(fn):
            super()._apply(fn, *args, **kwargs)
        device = self.weight.device
        if not isinstance(self.weight, EmbeddingWeight) and type(self.weight) is Parameter:
            # Restore the type: torch turns the weight into a plain Parameter on the way to meta and
            # back.
            self.weight = EmbeddingWeight(self.weight.data, self.weight.requires_grad)
        # Use the shared even map of the new device, unless the layer has another map. A map that
        # was on meta has no values.
        own = owners is not None and owners is not even_map(self.world_size, owners.device)
        if owners is not None and (was_meta or not own):
            self._buffers["owners"] = even_map(self.world_size, device)
        if was_meta:
            self.reset_parameters()
        if self.life is not None:
            self.life.move_to(device)
        self.count_change()  # tensors may have a new dtype or device
        return self

    def prepare(self, inserts: bool) -> None:
        """Check the weight before a lookup, if it may have changed since the last check.

        Raises:
            RuntimeError: rows without a key have been written to, and new keys would overwrite
                them.
        """
        if self.table is None:
            return
        weight = self.weight
        written = isinstance(weight, EmbeddingWeight) and weight.written()
        if written or inserts not in self.checked_modes:
            refuse_lost_values(self, written)
            if not inserts:
                self.checked_modes.add(False)

    def extra_repr(self) -> str:
        """Return the name, the shape, and the most important settings."""
        rows = ", use_hashtable=False"
        if self.table is not None:
            rows = "" if self.weight.is_meta else f", rows={len(self.table)}"
        capacity: Any = self.capacity
        if self.table is not None and self.grows:
            capacity = f"{self.table.capacity} of at most {self.capacity}"
        return (
            f"name={self._short_name!r}, capacity={capacity}, dim={self.embedding_vec_size}, "
            f"dtype={self.weight.dtype}{rows}"
        )


def check_same_process(tables: Sequence[EmbeddingTable], exchange: Exchange | None) -> None:
    """Raise RuntimeError or ValueError unless all tables were made for this exchange."""
    first = tables[0]
    group, device = first.process_group, first.weight.device
    ranks = (exchange.rank, exchange.world_size) if exchange else (0, 1)
    for table in tables:
        alike = table.process_group is group and table.weight.device == device
        own = exchange if alike else table.process_exchange()
        if own is not exchange or (table.rank, table.world_size) != ranks:
            table.check_ranks(own)
            raise ValueError(f"{table.name} and {first.name} have two process groups or devices")
