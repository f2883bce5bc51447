"""Which way a lookup goes: here, by key or by bag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..._compiling import refuse_recording
from ...distributed.exchange import Exchange, Offer
from ..own_shard import warn_of_parts_not_saved
from ..request import Request
from .by_bag import ByBag, bytes_to_move, can_go_by_bag, payload_bytes
from .by_key import ByKey
from .local import Local
from .tables import Kept, Tables

if TYPE_CHECKING:
    from ..shard import ShardedTable

# Checks the inputs of a call and says what it asks of each table.
Ask = Callable[[Tables], Sequence[Request]]


class Route(Protocol):
    """A lookup that has begun. Nothing has been changed so far."""

    tables: Tables

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """The rest of the lookup: an output for each request. With an error, all ranks raise it.

        Where requests have columns of one output, a route may return that one alone.
        """


def look_up(kept: Kept, asked: Sequence[ShardedTable], ask: Ask) -> list[torch.Tensor]:
    """Call several layers together.

    Args:
        kept: what is kept from call to call.
        asked: the layers: the same ones, in the same order, on every rank.
        ask: returns a request for each; what it raises is raised on every rank.
    """
    # Before other ranks are asked for anything: often a single rank exports a model.
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        refuse_recording(asked[0].name)
    exchange = _exchange(asked)
    if exchange is None:
        return _begin_here(kept, asked, ask).outputs()
    with exchange.lock:
        return _begin_on_ranks(exchange, kept, asked, ask).outputs()


def begin(kept: Kept, asked: Sequence[ShardedTable], ask: Ask) -> Route:
    """The first part of `look_up`, which does not wait for the keys to arrive.

    On a device it waits for what the current stream has by now, and for nothing that comes later.
    """
    exchange = _exchange(asked)
    if exchange is None:
        return _begin_here(kept, asked, ask)
    with exchange.stream.ahead():
        return _begin_on_ranks(exchange, kept, asked, ask)


def finish(route: Route, error: Exception | None) -> list[torch.Tensor]:
    """The rest of a lookup that `begin` has begun; see `Route.outputs`."""
    # It may have begun long ago.
    route.tables = route.tables.up_to_date()
    return route.outputs(error)


def _exchange(asked: Sequence[ShardedTable]) -> Exchange | None:
    # Which most processes have none of; to find that out from a layer takes longer.
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return asked[0].process_exchange()


def _begin_here(kept: Kept, asked: Sequence[ShardedTable], ask: Ask) -> Local:
    tables = kept.of(asked, None)
    return Local(tables, ask(tables))


@dataclass(kw_only=True)
class _Offer(Offer):
    """What a rank would send by key, which is the way that is taken unless the other is shorter."""

    by_key: ByKey
    requests: Sequence[Request]


def _begin_on_ranks(
    exchange: Exchange, kept: Kept, asked: Sequence[ShardedTable], ask: Ask
) -> ByKey | ByBag:
    # Counted before anything can fail or be interrupted, so that all ranks count alike.
    exchange.lookups += 1

    def by_key_of(tables: Tables) -> ByKey:
        return ByKey(
            exchange, tables, f"look up in {tables.plan()}, lookup number {exchange.lookups}"
        )

    if (tables := _agreed_before(exchange, kept, asked)) is not None:
        by_key = by_key_of(tables)
        by_key.begin_at_once(ask)
        return by_key

    def offer() -> _Offer:
        tables = kept.of(asked, exchange)
        by_key = by_key_of(tables)
        requests = ask(tables)
        by_key.ask(requests)
        facts = *_compare(by_key, requests), exchange.parts_saved
        return _Offer(by_key.counts, facts, by_key.plan, by_key=by_key, requests=requests)

    # A bad input here is an error on all ranks, none of which has changed anything yet.
    offered, agreed = exchange.meet("look up", offer)
    by_key = offered.by_key
    exchange.parts_saved = 0
    warn_of_parts_not_saved([saved for *_, saved in agreed.facts])
    if all(by_bag for by_bag, *_ in agreed.facts):
        by_bag = ByBag(exchange, by_key.plan, by_key.tables, offered.requests)
        by_bag.begin([size for _, size, _ in agreed.facts])
        return by_bag
    by_key.begin(agreed)
    return by_key


def _agreed_before(exchange: Exchange, kept: Kept, asked: Sequence[ShardedTable]) -> Tables | None:
    """The tables of a call, if all ranks have agreed to send their keys without a handshake."""
    if not exchange.at_once:
        return None
    try:
        tables = kept.of(asked, exchange)
        return tables if tables.plan() in exchange.at_once else None
    except Exception:  # which the handshake is to tell the others
        return None


def _compare(by_key: ByKey, requests: Sequence[Request]) -> tuple[int, int]:
    """Whether this rank would rather go by bag, and what it would then send to each rank.

    Forward and backward move the same numbers of vectors, so one of them is counted.
    """
    if by_key.tables.most_keys is not None:
        return 0, 0
    tables = by_key.tables.asked
    strategies = {table.strategy for table in tables}
    forced = "reduce_scatter" in strategies
    if "all_to_all" in strategies and not forced:
        return 0, 0
    # Mostly that tells, without a look at the requests.
    if not forced and by_key.bytes_of_bags() >= by_key.bytes_to_move():
        return 0, 0
    if "all_to_all" in strategies or not all(map(can_go_by_bag, requests)):
        if forced:
            raise ValueError(
                f"{tables[0].name}: strategy='reduce_scatter' pools on other ranks, which "
                f"goes neither with sample_weights that need a gradient nor in a group with layers "
                f"that do not add up or have strategy='all_to_all'"
            )
        return 0, 0
    for request in requests:
        request.check()
    if not forced and bytes_to_move(requests) >= by_key.bytes_to_move():
        return 0, 0
    return 1, payload_bytes(requests)
