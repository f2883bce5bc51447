"""Sets the clock of tables whose rows have scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch

from ..distributed.exchange import Exchange, Proposal, attempt
from ..errors import check_int
from ..tables.embedding_table import EmbeddingTable
from ..tables.life import RowLife


@torch.no_grad()
def set_clock(module: torch.nn.Module, now: int) -> int:
    """Set the clocks of all of a module's tables that have scores or a ttl.

    A clock that is never set counts lookups in training. From the first call on, only this function
    moves it, so that scores and ttl are in units of the caller's choice, such as event time in
    seconds. With several ranks this is a collective, and all clocks are set to the largest value
    passed on any rank.

    Args:
        module: a layer, a group, or a model with layers.
        now: the time, in [0, 2^63), or in [0, 2^32) for tables with scores other than LRU; not
            earlier than any of the clocks.

    Returns:
        The time that was set.

    Raises:
        TypeError: now is not an int.
        ValueError: now is out of range or would set a clock back, or no table has a clock; nothing
            has been changed.
        RuntimeError: ranks disagree, or a layer is on the meta device.

    Example:
        >>> layer = sparsekit.Embedding(1000, 8, on_full="evict", ttl=7 * 86400)
        >>> sparsekit.set_clock(layer, 1_700_000_000)
        1700000000
    """
    tables = [one for one in module.modules() if isinstance(one, EmbeddingTable) and one.life]

    def check() -> None:
        if not tables:
            raise ValueError(f"set_clock: no table of {type(module).__name__} has scores or a ttl")
        for table in tables:
            table.refuse_meta()
            life, clock = _clock(table)
            before = life.now(clock)
            check_int(table.name, "the clock", now, 0, life.score.most_clock)
            if now < before:
                raise ValueError(f"{table.name}: the clock must not go back, got {now} at {before}")

    exchange = tables[0].process_exchange() if tables else None
    if exchange is None:
        check()
    else:
        now = _latest(exchange, now, check)
    for table in tables:
        life, clock = _clock(table)
        life.set_by_user = True
        clock.fill_(now)
        life.wrote(clock, now)
    return now


def _clock(table: EmbeddingTable) -> tuple[RowLife, torch.Tensor]:
    return cast(RowLife, table.life), cast(torch.Tensor, table.clock)


def _latest(exchange: Exchange, now: int, check: Callable[[], None]) -> int:
    nothing = torch.empty(exchange.world_size, 0, dtype=torch.int64, device=exchange.device)

    def propose() -> Proposal:
        check()
        return Proposal(f"set clocks, lookup number {exchange.lookups}", nothing, (now, 0, 0))

    with exchange.lock:
        exchange.lookups += 1
        agreed = exchange.agree("set clocks", attempt(propose))
    return max(latest for latest, *_ in agreed.facts)
