"""Defines the parameter of an embedding layer, and delivers its gradient."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import Any, cast

import torch

from .._pybind import count_up, each_is
from ..device_rooms import commit, rows_with_memory
from ..distributed.shard_gradient import ShardGradient
from ..memory import first_rows, parts_written, with_length
from ..row_files import RowFiles
from .counter import Counter
from .hash_table import HashTable
from .in_flight import InFlight
from .row_states import follow_keys, initial_rows, states_of_rows
from .written_rows import WrittenRows

# Approximate number of rows in each of the two samples that are checked after a write.
SEEN_ROWS = 64


# Counts, over all tables, the changes to rows' keys.
key_changes = Counter()


class EmbeddingWeight(torch.nn.Parameter):
    """The parameter of an embedding layer; optimizers tell it from dense parameters by its type.

    An optimizer may set the functions `before_read` and `update_in_backward`. Copies of the
    parameter lack these and most other attributes.
    """

    # Called before rows are read or written, with the weight and the rows, or None for all rows.
    before_read: "Callable[[EmbeddingWeight, torch.Tensor | None], None] | None" = None
    # Called in backward instead of setting ``grad``: `RowOptimizer.update_in_backward`. The
    # reference is weak, so that deleting the optimizer detaches it.
    update_in_backward: "weakref.WeakMethod[Callable[..., None]] | None" = None
    # True if an optimizer has changed all rows, including those without a key.
    moved: bool = False
    # Tensor version after the last write that was checked or made by the library; see `written`.
    # None while the library writes, or after an interrupted write.
    noted_version: int | None = None
    # A weak reference to the hash table that assigns these rows; see `belongs_to`.
    _table: "weakref.ref[HashTable] | None" = None
    # Weak references to optimizers that may have states for these rows; see `is_stepped_by`.
    _optimizers: "weakref.WeakSet[torch.optim.Optimizer] | None" = None
    # Address and count of the row indices in a coalesced gradient that autograd will put in
    # ``grad``.
    _on_its_way: "tuple[int, int] | None" = None
    # Lookups whose backward may still run, kept only if rows may be removed first; see `InFlight`.
    lookups: "weakref.WeakSet[InFlight] | None" = None
    # The layer's name, if the layer is sharded over ranks.
    _shard_of: str | None = None
    # `reach` of a weight that has no hash table, or no longer has one.
    _reach: int | None = None
    # Value of `key_changes` after the last change to these rows' keys.
    keys_changed_at: int = 0
    # The files that hold rows and their states; None if they are in memory.
    files: RowFiles | None = None
    # Marks of the rows that have been written to, if a delta log needs them.
    written_rows: WrittenRows | None = None

    def catch_up(self, rows: torch.Tensor | None = None) -> None:
        """Apply the optimizer steps that these rows, or all rows, have missed."""
        if rows is None and self.files is not None:
            self.files.have_passed()
        if self.before_read is not None:
            self.before_read(self, rows)

    def belongs_to(self, table: HashTable) -> None:
        """Record the hash table that assigns these rows."""
        self._table = weakref.ref(table)
        if self.noted_version is None:
            self._note_rows()

    def _note_rows(self) -> None:
        """Treat all values, including those in rows without a key, as written by the library.

        Before the rows were saved, an optimizer may have changed those without a key.
        """
        self.note_version()
        table = None if self._table is None else self._table()
        if table is not None and not self.is_meta and (keys := len(table)):
            self.moved |= free_rows_hold(self, keys)

    def note_version(self) -> None:
        """Record that all writes so far have been checked."""
        self.noted_version = -1 if self.is_inference() else self._version

    def written(self) -> bool:
        """Return whether other code wrote to the weight, according to torch's version counter.

        The counter misses writes to ``weight.data``, and writes in inference mode to a weight that
        was made in that mode.
        """
        if self.noted_version is None:
            self.note_version()
        return not self.is_inference() and self._version != self.noted_version

    def begin_writing(self) -> None:
        """Count writes from here to `end_writing` as the library's own; see `own_writes`."""
        if not self.written():
            self.noted_version = None

    def end_writing(self) -> None:
        """End the series of writes that `begin_writing` started."""
        if self.noted_version is None:
            self.note_version()

    def is_stepped_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Register an optimizer: from now on, its states move with their keys."""
        if self._optimizers is None:
            self._optimizers = weakref.WeakSet()
        self._optimizers.add(optimizer)

    def keys(self) -> torch.Tensor | None:
        """Return the key of each row in use, int64; None without a hash table."""
        table = None if self._table is None else self._table()
        return None if table is None else table.keys()

    def is_looked_up_by(self, lookup: InFlight) -> None:
        """Register a lookup whose rows must be updated when rows are renumbered."""
        if self.lookups is None:
            self.lookups = weakref.WeakSet()
        self.lookups.add(lookup)

    @property
    def reach(self) -> int | None:
        """Number of leading rows in reach, in a table that grows; None means all rows.

        Rows out of reach have not changed since they were created. Optimizer states do not have
        their initial values there yet; see `open_rows`.
        """
        table = None if self._table is None else self._table()
        if table is None:
            return self._reach
        if table.reach == table.max_capacity:
            return None
        # On a device, where reading the length would mean waiting, the whole capacity is in reach.
        if self.is_meta or table.reach >= table.capacity:
            return table.reach
        if table.reach < len(table) <= table.capacity:
            table.extend_reach(len(table))  # only after an interrupted lookup
        return table.reach

    def reserve(self, rows: int) -> None:
        """Bring the first `rows` rows into reach, if the table can grow that far."""
        table = None if self._table is None else self._table()
        if table is not None and table.reach < rows <= table.max_capacity:
            table.reserve(rows)

    def allocate(self, rows: int) -> None:
        """Allocate device memory for the first rows and their states.

        Raises:
            RuntimeError: there is no memory.
        """
        commit(self.detach(), rows)
        for optimizer in list(self._optimizers or ()):
            for state in states_of_rows(optimizer, self):
                commit(state, rows)

    def open_rows(self, before: int, after: int) -> None:
        """Write initial states for rows ``[before, after)``, which are coming into reach."""
        self._reach = after
        for optimizer in list(self._optimizers or ()):
            for state, initial in initial_rows(optimizer, self):
                state[before:after].fill_(initial)

    def note_change(self) -> None:
        """Record that rows have new keys, so that the backward of earlier lookups fails."""
        self.keys_changed_at = key_changes.next()

    def note_keys(self) -> None:
        """Record the keys in optimizer states, since rows are about to be given to other keys."""
        self.note_change()
        self.catch_up()  # missed steps belong to the old keys
        self.noted_version = None  # earlier writes belong to the old keys too
        keys: torch.Tensor | None = None
        for optimizer in list(self._optimizers or ()):
            state = optimizer.state.get(self)
            if state and "keys" not in state:
                if keys is None:
                    try:
                        keys = self.keys()
                    except ValueError:  # after to_empty, a table is uninitialized
                        keys = torch.empty(0, dtype=torch.int64, device=self.device)
                state["keys"] = keys

    def follow_keys(self) -> None:
        """Move the states of all optimizers to the current rows of their keys."""
        self._note_rows()
        for optimizer in list(self._optimizers or ()):
            if "keys" in optimizer.state.get(self, ()):
                self.settle(optimizer)

    def settle(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the states of one optimizer to the current rows of their keys."""
        if (keys := self.keys()) is not None:
            follow_keys(optimizer, self, keys)

    def __repr__(self) -> str:  # type: ignore[override]
        have = rows_with_memory(self)
        if have == len(self):
            return super().__repr__()
        # Rows without memory cannot be read.
        rows = torch.nn.Parameter(self.data[:have], self.requires_grad)
        return f"{list(self.shape)}, with memory for the first {have} rows: {rows!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> "EmbeddingWeight":
        self.catch_up()
        copied: EmbeddingWeight
        if (rows := self.rows_to_copy()) is not None:
            settings = len(self), self.reach, self.requires_grad, deepcopy(self.files, memo)
            copied = memo[id(self)] = _with_room(self.data[:rows], *settings)
        else:
            copied = super().__deepcopy__(memo)
        copied.moved = self.moved
        if self.written():
            copied.noted_version = -1  # the copy also counts as written to
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        self.catch_up()
        if (rows := self.rows_to_copy()) is not None:
            settings = len(self), self.reach, self.requires_grad, self.files
            return _with_room, (first_rows(self.data, rows), *settings)
        return EmbeddingWeight, (self.data, self.requires_grad)

    def rows_to_copy(self) -> int | None:
        """Return how many leading rows a copy needs; None means a plain copy of all rows."""
        if (reach := self.reach) is not None or self.files is None or self.is_meta:
            return reach
        table = None if self._table is None else self._table()
        if table is None or self.moved or self.written():
            return len(self)
        # If there are no keys, rows may have values that make the next lookup raise an error.
        parts = () if len(table) else parts_written(self.data)
        return max((part.stop for part in parts), default=len(table))


def _with_room(
    rows: torch.Tensor,
    capacity: int,
    reach: int | None,
    requires_grad: bool,
    files: RowFiles | None = None,
) -> EmbeddingWeight:
    """Return a weight with these rows and room for more."""
    if files is None or rows.is_meta:
        longer = with_length(rows, capacity, reach)
    else:
        longer = files.holding(rows)
    weight = EmbeddingWeight(longer, requires_grad)
    weight._reach, weight.files = reach, files
    return weight


def free_rows_hold(weight: torch.Tensor, keys: int) -> bool:
    """Return whether sampled rows without a key contain nonzeros; such rows start as zeros.

    The sample consists of the next free rows and some of the other free rows. Checking all rows
    after each write would slow down code that writes row by row.
    """
    free = weight.detach()[keys : rows_with_memory(weight)]
    step = max(1, len(free) // SEEN_ROWS)
    return bool(free[:SEEN_ROWS].any()) or bool(free[::step].any())


@contextmanager
def own_writes(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Count writes in the body as the library's own; ignore tensors of other types."""
    for weight in weights:
        if isinstance(weight, EmbeddingWeight):
            weight.begin_writing()
    yield
    for weight in weights:
        # torch may have replaced the weight with another kind of parameter.
        if isinstance(weight, EmbeddingWeight):
            weight.end_writing()


def count_own_writes(weights: list[torch.Tensor]) -> None:
    """Record that the library has just written once to each of these weights."""
    count_up(weights, "noted_version")


def update_of(weight: torch.Tensor) -> Callable[..., None] | None:
    """Return the function that updates a weight in backward; None if no optimizer does."""
    attached = weight.update_in_backward if isinstance(weight, EmbeddingWeight) else None
    return None if attached is None else attached()


def update_of_all(weights: list[torch.Tensor]) -> Callable[..., None] | None:
    """Return the function that updates these weights in backward, if all share one."""
    attached = getattr(weights[0], "update_in_backward", None)
    if attached is None:
        return None
    if len(weights) > 1 and not each_is(weights, "update_in_backward", attached):
        return None
    return cast(Callable[..., None] | None, attached())


# A weight, the rows to update, and the gradients of these rows.
Update = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def deliver_gradients(
    updates: Sequence[Update], shards_of: Sequence[str | None]
) -> list[torch.Tensor | None]:
    """Return the coalesced sparse gradient of each weight; None if its optimizer applies it here.

    Args:
        updates: one for each weight, with rows in ascending order.
        shards_of: for each weight, the layer's name if the layer is sharded over ranks, else None.
    """
    gradients: list[torch.Tensor | None] = []
    used_up: dict[Callable[..., None], list[Update]] = {}
    for update, shard_of in zip(updates, shards_of, strict=True):
        in_backward = update_of(update[0])
        if in_backward is None:
            gradients.append(_sparse(*update, shard_of))
        else:
            gradients.append(None)
            used_up.setdefault(in_backward, []).append(update)
    for in_backward, own in used_up.items():
        in_backward([update[0] for update in own], partial(list, own), None)
    return gradients


def _sparse(
    weight: torch.Tensor, rows: torch.Tensor, grad: torch.Tensor, shard_of: str | None
) -> torch.Tensor:
    if not rows.shape[0]:
        # Give an empty gradient its own memory: torch adds to it by resizing it in place, which
        # would overwrite the next table's gradient, right after it in memory.
        rows, grad = torch.empty_like(rows), torch.empty_like(grad)
    _watch_gradient(weight)
    if isinstance(weight, EmbeddingWeight):
        weight._on_its_way = rows.data_ptr(), rows.shape[0]
        weight._shard_of = shard_of
    # Avoid torch.sparse_coo_tensor: in torch 2.11 it warns about disabled checks even if its own
    # argument disables them.
    return torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        weight.shape,
        rows[None],  # faster than unsqueeze
        grad,
        dtype=grad.dtype,
        layout=torch.sparse_coo,
        device=grad.device,
        is_coalesced=True,
    )


def _watch_gradient(weight: torch.Tensor) -> None:
    """Register the hook that marks the weight's gradient once autograd has set it."""
    hooks = weight._post_accumulate_grad_hooks or {}
    if weight.is_leaf and weight.requires_grad and _mark not in hooks.values():
        # Register the hook here rather than in a layer's __init__, since a copied layer has a new
        # weight without hooks.
        weight.register_post_accumulate_grad_hook(_mark)


def _mark(weight: torch.Tensor) -> None:
    _mark_coalesced(weight)
    shard_of = getattr(weight, "_shard_of", None)
    grad = weight.grad
    if shard_of is None or type(grad) is not torch.Tensor or grad.requires_grad:
        return
    weight.grad = ShardGradient.of(grad, shard_of)


def _mark_coalesced(weight: torch.Tensor) -> None:
    """Restore the coalesced flag, which autograd drops if it does not copy a gradient."""
    grad = weight.grad
    on_its_way = getattr(weight, "_on_its_way", None)
    if on_its_way is not None:
        weight._on_its_way = None  # type: ignore[attr-defined]
    if grad is not None and grad.is_sparse and not grad.is_coalesced():
        indices = grad._indices()
        # A sum with an earlier gradient has more rows, unless the earlier gradient was empty.
        taken_over = on_its_way == (indices.data_ptr(), indices.shape[1])
        if taken_over or bool((indices[0, 1:] > indices[0, :-1]).all()):
            grad._coalesced_(True)
        else:
            weight.grad = grad.coalesce()
