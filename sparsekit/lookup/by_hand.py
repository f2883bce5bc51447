"""Removes keys from a layer on request: those with the lowest scores, or all."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from .._compiling import uncompiled
from ..distributed.exchange import Exchange, Proposal, attempt
from ..errors import check_int, check_number
from ..tables.embedding_table import EmbeddingTable
from ..tables.removal import remove_rows
from .access import scored_life
from .sweep import Sweep
from .to_owners import signature_of


@uncompiled
@torch.no_grad()
def evict(layer: EmbeddingTable, fraction: float | None, keep: int | None) -> int:
    """Drop the rows with the lowest scores; see `EmbeddingLayer.evict`."""

    def check() -> None:
        _check_hashed(layer, "evict")
        scored_life(layer, "there is nothing to choose by")
        if (fraction is None) == (keep is None):
            raise ValueError(
                f"{layer.name}: evict takes either fraction or keep, got fraction={fraction!r} and "
                f"keep={keep!r}"
            )
        if keep is not None:
            check_int(layer.name, "keep", keep, 0, 2**63 - 1)
        elif not 0 <= check_number(layer.name, "fraction", fraction) <= 1:
            raise ValueError(f"{layer.name}: fraction must be in [0, 1], got {fraction!r}")

    def drop(exchange: Exchange | None, what: str) -> int:
        sweep = Sweep(layer, exchange, what)
        in_use = sweep.in_use()
        count = in_use - keep if keep is not None else round(float(fraction or 0) * in_use)
        if count <= 0:
            return 0
        new_rows = sweep.drop_lowest(count)
        return 0 if new_rows is None else int((new_rows < 0).sum())

    return _together(layer, f"evict (fraction {fraction}, keep {keep})", check, drop)


@uncompiled
@torch.no_grad()
def clear(layer: EmbeddingTable) -> int:
    """Remove all keys; see `EmbeddingLayer.clear`."""

    def check() -> None:
        _check_hashed(layer, "clear")
        if layer.weight.grad is not None:
            raise RuntimeError(
                f"{layer.name}: weight has a gradient, whose rows are about to lose their keys; "
                f"call optimizer.step() or zero_grad() before clear"
            )

    def drop(exchange: Exchange | None, what: str) -> int:
        rows = torch.arange(len(layer.table or ()), device=layer.seed.device)
        layer.weight.note_change()
        if len(rows):
            remove_rows(layer, rows)
        if layer.life is not None:
            layer.life.forget_counts(layer.weight.device)
            layer.life.erased += len(rows)
        return len(rows)

    return _together(layer, "clear", check, drop)


def _check_hashed(layer: EmbeddingTable, what: str) -> None:
    layer.refuse_meta()
    if layer.table is None:
        raise ValueError(
            f"{layer.name}: without the hash table every key has a row of its own, so there is "
            f"nothing to {what}"
        )
    layer.table.refuse_sharing()


def _together(
    layer: EmbeddingTable,
    what: str,
    check: Callable[[], None],
    drop: Callable[[Exchange | None, str], int],
) -> int:
    """Drop rows on all ranks once every rank has passed the check; return the total dropped."""
    exchange = layer.process_exchange()
    if exchange is None:
        layer.check_ranks(None)
        check()
        return drop(None, what)
    with exchange.lock:
        exchange.lookups += 1
        nothing = torch.empty(exchange.world_size, 0, dtype=torch.int64, device=exchange.device)

        def propose() -> Proposal:
            signature = signature_of(exchange, layer, what)
            check()
            return Proposal(signature, nothing)

        proposal = attempt(propose)
        exchange.agree(what, proposal)
        signature = cast(Proposal, proposal).what
        done = f"{what}: done, {signature}"
        dropped = attempt(lambda: Proposal(done, nothing, (drop(exchange, signature), 0, 0)))
        return sum(count for count, *_ in exchange.agree(done, dropped).facts)
