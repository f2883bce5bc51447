"""Which way a lookup goes: here, by key or by bag."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ..._compiling import uncompiled
from ...distributed.exchange import Exchange, Parcel
from ..request import Request
from .by_bag import ByBag, bytes_to_move, can_go_by_bag, payload_bytes
from .by_key import ByKey
from .local import Local

if TYPE_CHECKING:
    from ..shard import ShardedTable

# Checks the inputs of a call and says what it asks of each table.
Ask = Callable[[], list[Request]]


class Route(Protocol):
    """A lookup that has begun. Nothing has been changed so far."""

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """The rest of the lookup: an output for each request. With an error, all ranks raise it.

        Where requests have columns of one output, a route may return that one alone.
        """


# Its shapes depend on the keys, some of it happens in the optimizer, and collectives are nothing
# for a compiler.
@uncompiled
def look_up(tables: Sequence[ShardedTable], ask: Ask) -> list[torch.Tensor]:
    """Call several layers together.

    Args:
        tables: the layers: the same ones, in the same order, on every rank.
        ask: returns a request for each; what it raises is raised on every rank.
    """
    exchange = tables[0].process_exchange()
    if exchange is None:
        return _begin_here(tables, ask).outputs()
    with exchange.lock:
        return _begin_on_ranks(exchange, tables, ask).outputs()


@uncompiled
def begin(tables: Sequence[ShardedTable], ask: Ask) -> Route:
    """The first part of `look_up`, which does not wait for the keys to arrive."""
    exchange = tables[0].process_exchange()
    if exchange is None:
        return _begin_here(tables, ask)
    return _begin_on_ranks(exchange, tables, ask)


@uncompiled
def finish(route: Route, error: Exception | None) -> list[torch.Tensor]:
    """The rest of a lookup that `begin` has begun; see `Route.outputs`."""
    return route.outputs(error)


def _begin_here(tables: Sequence[ShardedTable], ask: Ask) -> Local:
    _check_exchange(tables, None)
    return Local(ask())


@dataclass(kw_only=True)
class _Offer(Parcel):
    """What a rank would send by key, which is the way that is taken unless the other is shorter."""

    by_key: ByKey


def _begin_on_ranks(exchange: Exchange, tables: Sequence[ShardedTable], ask: Ask) -> ByKey | ByBag:
    # Counted before anything can fail or be interrupted, so that all ranks count alike.
    exchange.lookups += 1

    def offer() -> _Offer:
        _check_exchange(tables, exchange)
        described = ", ".join(table.plan() for table in tables)
        plan = f"look up in {described}, lookup number {exchange.lookups}"
        requests = ask()
        for request in requests:
            request.check()
        by_key = ByKey(exchange, plan, requests)
        data, splits = by_key.pack()
        return _Offer(data, splits, _compare(by_key), plan, by_key=by_key)

    # A bad input here is an error on all ranks, none of which has changed anything yet.
    offered, agreed = exchange.agree_to_send("look up", offer)
    by_key = offered.by_key
    # Every rank sees the same numbers, so all take the same way.
    bytes_by_key, bytes_by_bag = (sum(facts[i] for facts in agreed.facts) for i in (0, 1))
    if bytes_by_bag < bytes_by_key:
        by_bag = ByBag(exchange, by_key.plan, by_key.requests)
        by_bag.begin([facts[2] for facts in agreed.facts])
        return by_bag
    by_key.begin(offered, agreed.sizes)
    return by_key


def _check_exchange(tables: Sequence[ShardedTable], exchange: Exchange | None) -> None:
    """Raise unless this is what all tables were made for, and have in common."""
    group, device = tables[0].process_group, tables[0].weight.device
    ranks = (exchange.rank, exchange.world_size) if exchange else (0, 1)
    for table in tables:
        alike = table.process_group is group and table.weight.device == device
        own = exchange if alike else table.process_exchange()
        if own is not exchange or (table.rank, table.world_size) != ranks:
            table.check_ranks(own)
            raise ValueError(
                f"{table.name} and {tables[0].name} have two process groups or devices"
            )


# More bytes than anything could move.
_NEVER = 1 << 50


def _compare(by_key: ByKey) -> tuple[int, int, int]:
    """Bytes of the two ways, by key and by bag; and what would be sent to each rank by bag.

    Forward and backward move the same numbers of vectors, so one of them is counted.
    """
    requests = by_key.requests
    strategies = {request.table.strategy for request in requests}
    if strategies == {"all_to_all"}:
        return 0, 0, 0
    forced = "reduce_scatter" in strategies
    if "all_to_all" in strategies or not all(map(can_go_by_bag, requests)):
        if forced:
            raise ValueError(
                f"{requests[0].table.name}: strategy='reduce_scatter' pools on other ranks, which "
                f"goes neither with sample_weights that need a gradient nor in a group with layers "
                f"that do not pool or have strategy='all_to_all'"
            )
        return 0, _NEVER, 0
    if forced:
        return 1, 0, payload_bytes(requests)
    return by_key.bytes_to_move(), bytes_to_move(requests), payload_bytes(requests)
