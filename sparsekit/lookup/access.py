"""Reads, writes and lists vectors of a layer by their keys.

With several ranks, each rank may pass any keys; they are sent to the ranks that own them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch

from .. import ops
from .._compiling import uncompiled
from ..distributed.exchange import Proposal, attempt
from ..errors import check_int
from ..ops._checks import FLOATING, KEY_DTYPES, check_same_device, check_tensor
from ..tables import saved_state as saved
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.life import RowLife
from ..tables.removal import remove_rows
from ..tables.scores import UserScore
from ..tables.written_rows import Write
from .fallback import redirected_keys
from .make_room import Known, make_room_here, make_room_on_ranks, rows_at_most
from .padding import is_padding
from .plan import TableBatch
from .request import check_keys, one_by_one
from .sweep import Asked
from .table_ops import TableOps
from .to_owners import ToOwners, exchanged
from .user_scores import UserScores, scores_of_keys, scores_on_ranks


class Items(NamedTuple):
    """Keys of a layer's rows, and the vector of each key.

    Attributes:
        keys: int64 ``[n]``.
        vectors: ``[n, dim]``, a copy.
    """

    keys: torch.Tensor
    vectors: torch.Tensor


@uncompiled
@torch.no_grad()
def vectors_of(layer: EmbeddingTable, keys: torch.Tensor) -> torch.Tensor:
    """Return the vectors of keys; see `EmbeddingLayer.vectors`."""

    def checked() -> torch.Tensor:
        return _checked_keys(layer, keys).reshape(-1)

    exchange = layer.process_exchange()
    if exchange is None:
        layer.check_ranks(None)
    # With fallback rows there are two lookups, and no other thread may send anything between them.
    with nullcontext() if exchange is None else exchange.lock:
        if layer.fallback is not None:
            found = redirected_keys(layer, exchange, lambda: Asked(checked()), inserts=False)

            def checked() -> torch.Tensor:
                return found

        if exchange is None:
            return _own_vectors(layer, checked()).view(*keys.shape, layer.embedding_vec_size)
        way = ToOwners(exchange, layer, "vectors of keys", checked)
        asked = way.send("keys", way.keys)
        vectors = exchanged(
            exchange,
            f"vectors: {way.signature}",
            lambda: _own_vectors(layer, asked),
            way.theirs,
            way.own,
            layer.weight,
        )
    out = torch.empty_like(vectors)
    out[way.order] = vectors
    return out.view(*keys.shape, layer.embedding_vec_size)


@uncompiled
@torch.no_grad()
def assign(layer: EmbeddingTable, keys: torch.Tensor, vectors: torch.Tensor) -> None:
    """Set the vectors of keys; see `EmbeddingLayer.assign`."""

    def checked() -> torch.Tensor:
        return _checked_pairs(layer, keys, vectors)[0]

    exchange = layer.process_exchange()
    if exchange is None:
        layer.check_ranks(None)
        own = checked()
        scores = scores_of_keys(_by_user(layer), lambda _: Asked(own))
        if layer.life is not None and layer.life.sweeps:
            of_layer = [layer], [rows_at_most(layer)], [len(own)]
            make_room_here(*of_layer, lambda _: Asked(own), by_hand=True)
        _write(layer, own, vectors, scores)
        return
    with exchange.lock:
        way = ToOwners(exchange, layer, "assign vectors", checked)
        come = way.send("keys", way.keys)
        values = way.send("vectors", vectors[way.order].to(layer.weight.dtype))
        scores = {}
        if by_user := _by_user(layer):
            scores = scores_on_ranks(by_user, lambda _: Asked(come), exchange, way.signature)
        failed = None
        if layer.life is not None and layer.life.sweeps:
            known = Known(layer, way.rows, way.asked, layer.life.keys_finished)
            failed = make_room_on_ranks(
                [known], lambda _: Asked(come), exchange, way.signature, by_hand=True
            )
        # If the table is full on any rank, raise an error on all ranks.
        written = failed or attempt(lambda: _write(layer, come, values, scores))
        exchange.agree(f"assigned: {way.signature}", written)


@torch.no_grad()
def assign_own(layer: EmbeddingTable, keys: torch.Tensor, vectors: torch.Tensor) -> None:
    """Run `EmbeddingLayer.assign` without communication; all ranks must pass the same arguments."""
    keys, vectors = _checked_pairs(layer, keys, vectors)
    if layer.world_size > 1:
        mine = layer.owned(keys)
        keys, vectors = keys[mine], vectors[mine]
    scores = scores_of_keys(_by_user(layer), lambda _: Asked(keys))
    _write(layer, keys, vectors, scores)


def _by_user(layer: EmbeddingTable) -> list[EmbeddingTable]:
    """Return a list with the layer if the user provides its scores, otherwise an empty list."""
    by_user = layer.life is not None and isinstance(layer.life.score, UserScore)
    return [layer] if by_user else []


@uncompiled
@torch.no_grad()
def erase(layer: EmbeddingTable, keys: torch.Tensor) -> int:
    """Remove keys and overwrite their data; see `EmbeddingLayer.erase`."""

    def checked() -> torch.Tensor:
        if layer.table is None:
            raise ValueError(
                f"{layer.name}: without the hash table every key has a row of its own, so no key "
                f"can be erased; assign another vector to it"
            )
        if layer.weight.grad is not None:
            raise RuntimeError(
                f"{layer.name}: weight has a gradient, whose rows are about to get other keys; "
                f"call optimizer.step() or zero_grad() before erase"
            )
        return _checked_keys(layer, keys).reshape(-1)

    exchange = layer.process_exchange()
    if exchange is None:
        layer.check_ranks(None)
        return _erase_own(layer, checked())
    with exchange.lock:
        way = ToOwners(exchange, layer, "erase keys", checked)
        come = way.send("keys", way.keys)
        what = f"erased: {way.signature}"

        def erased() -> Proposal:
            nothing = torch.empty(exchange.world_size, 0, dtype=torch.int64, device=come.device)
            return Proposal(what, nothing, (_erase_own(layer, come), 0, 0))

        agreed = exchange.agree(what, attempt(erased))
        total = sum(count for count, *_ in agreed.facts)
        if total > 0:  # a backward pass for an earlier forward pass must fail on all ranks
            layer.weight.note_change()
    return total


def _erase_own(layer: EmbeddingTable, keys: torch.Tensor) -> int:
    """Erase the int64 keys ``[n]`` that have rows on this rank; return how many were erased."""
    table = cast(HashTable, layer.table)
    table.refuse_sharing()
    rows = table.find(keys).unique()
    rows = rows[rows >= 0]
    if layer.life is not None:
        layer.life.erase_counts(keys)
    if len(rows):
        layer.weight.note_change()
        remove_rows(layer, rows)
        if layer.life is not None:
            layer.life.erased += len(rows)
    return len(rows)


def items(layer: EmbeddingTable, chunk: int, min_score: int | None) -> Iterator[Items]:
    """Yield keys and vectors; see `EmbeddingLayer.items`."""
    chunk = check_int(layer.name, "chunk", chunk, 1, 2**31 - 1)
    layer.refuse_meta()
    chosen = None
    if min_score is not None:
        min_score = check_int(layer.name, "min_score", min_score, 0, 2**63 - 1)
        chosen = (scores_of(layer) >= min_score).nonzero().squeeze(1)
    return _items(layer, chunk, chosen)


def scores_of(layer: EmbeddingTable) -> torch.Tensor:
    """Return the scores of the rows in use, in the form of `Evicted.scores`, int64 ``[rows]``.

    Raises:
        ValueError: rows have no scores.
    """
    life = scored_life(layer, "there is no min_score")
    words = cast(torch.Tensor, layer.scores)[: len(cast(HashTable, layer.table))]
    return life.score.order(words, life.now(cast(torch.Tensor, layer.clock)))


def _items(layer: EmbeddingTable, chunk: int, chosen: torch.Tensor | None) -> Iterator[Items]:
    """Yield all rows in chunks, or only those in ``chosen``, int64 ``[n]`` in ascending order."""
    if layer.table is not None:
        keys = layer.table.keys()
        if layer.fallback is not None:
            of_users = ~layer.fallback.has(keys)
            chosen = of_users.nonzero().squeeze(1) if chosen is None else chosen[of_users[chosen]]
        keys = keys if chosen is None else keys[chosen]
    else:
        rows = torch.arange(layer.capacity, device=layer.weight.device)
        keys = rows * layer.world_size + layer.rank
    for begin in range(0, len(keys), chunk):
        of_chunk = keys[begin : begin + chunk]
        end = begin + len(of_chunk)
        at = torch.arange(begin, end, device=keys.device) if chosen is None else chosen[begin:end]
        yield Items(of_chunk, _read(layer, at))


def _checked_keys(layer: EmbeddingTable, keys: torch.Tensor) -> torch.Tensor:
    """Check that keys, of any shape, are valid for the table; return them as int64.

    Raises:
        TypeError, ValueError, IndexError: the keys are not valid.
    """
    layer.refuse_meta()
    if not isinstance(keys, torch.Tensor):
        raise TypeError(f"{layer.name}: keys must be a tensor, got {type(keys).__name__}")
    check_tensor(layer.name, "keys", keys, KEY_DTYPES, keys.dim())
    check_same_device(layer.name, weight=layer.weight, keys=keys)
    check_keys(layer, keys)
    keys = keys.to(torch.int64)
    if layer.fallback is not None:
        layer.fallback.check(layer.name, keys)
    return keys


def _checked_pairs(
    layer: EmbeddingTable, keys: torch.Tensor, vectors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    checked = _checked_keys(layer, keys)
    check_tensor(layer.name, "keys", keys, KEY_DTYPES, 1)
    check_tensor(layer.name, "vectors", vectors, FLOATING, 2)
    check_same_device(layer.name, weight=layer.weight, keys=keys, vectors=vectors)
    shape = len(keys), layer.embedding_vec_size
    if vectors.shape != shape:
        raise ValueError(
            f"{layer.name}: vectors must have shape {shape}, got {tuple(vectors.shape)}"
        )
    padding = layer.padding_key
    if layer.table is None and padding is not None:
        rows = layer.capacity * layer.world_size
        if not 0 <= padding < rows and bool((found := is_padding(keys, padding)).any()):
            raise IndexError(
                f"{layer.name}: key {padding} at position {int(found.nonzero()[0])} is padding_key "
                f"and has no row; rows are those of keys in [0, {rows})"
            )
    return checked, vectors


def _own_vectors(layer: EmbeddingTable, keys: torch.Tensor) -> torch.Tensor:
    """Return the vectors ``[n, dim]`` of this rank's int64 keys ``[n]``, as read in evaluation."""
    layer.prepare(inserts=False)
    rows = keys // layer.world_size if layer.table is None else layer.table.find(keys)
    absent = rows < 0
    if layer.padding_key is not None:
        padding = is_padding(keys, layer.padding_key)
        rows[padding] = -1
        absent &= ~padding
    vectors = _read(layer, rows)
    places = absent.nonzero().squeeze(1)
    layer.absent.write_(vectors, keys[places], places, seed=int(layer.seed))
    return vectors


def _read(layer: EmbeddingTable, rows: torch.Tensor) -> torch.Tensor:
    """Return the vectors of the given rows; a negative row gives zeros."""
    if getattr(layer.weight, "before_read", None) is not None:
        layer.catch_up(ops.unique(rows)[0])  # catching up ignores negative rows
    return ops.gather_rows(layer.weight.detach(), rows)


def _write(
    layer: EmbeddingTable,
    keys: torch.Tensor,
    vectors: torch.Tensor,
    scores: UserScores,
) -> None:
    """Set the vectors of int64 keys that this rank owns; a repeated key gets its last vector."""
    distinct, numbers, _ = ops.unique(keys)
    if len(distinct) < len(keys):
        last = torch.zeros_like(distinct)
        places = torch.arange(len(keys), device=keys.device)
        vectors = vectors[last.scatter_reduce_(0, numbers, places, "amax")]
    rows = _insert(layer, distinct, scores)
    if layer.life is not None:
        saved.run_all(layer.life.removal_of_counts(distinct))
    write = Write([layer.weight])
    layer.weight.index_copy_(0, rows, vectors.to(layer.weight.dtype))
    write.done([rows])


def scored_life(layer: EmbeddingTable, so: str) -> RowLife:
    """Return a layer's `RowLife`; raise ValueError if its rows have no scores."""
    if layer.life is None:
        raise ValueError(
            f"{layer.name}: rows have no scores, so {so}; make the layer with score='lru' or "
            f"'lfu', or with on_full='evict'"
        )
    return layer.life


def _insert(table: EmbeddingTable, keys: torch.Tensor, user_scores: UserScores) -> torch.Tensor:
    """Return the int64 rows of this rank's distinct keys; insert new keys, even in evaluation."""
    batch = TableBatch([0], [table], inserts=True)
    given = [one_by_one(table, keys)], None
    call = TableOps(batch, *given, ticks=False, user_scores=user_scores)
    call.find()
    return cast(torch.Tensor, call.rows).to(torch.int64)
