"""Chooses the route of a lookup: local, by key or by bag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist

from .._compiling import refuse_recording
from ..distributed.exchange import Agreement, Exchange, Proposal
from ..tables.embedding_table import EmbeddingTable
from ..tables.own_shard import warn_of_parts_not_saved
from .by_bag import ByBag, bytes_to_move, can_go_by_bag, payload_bytes
from .by_key import ByKey
from .fallback import redirected
from .in_files import ask_ahead
from .local import Local
from .make_room import Known, known_here, known_of, swept_columns, swept_tables
from .plan import LookupPlan, PlanCache
from .request import LazyRequests, Request
from .watch import tell, watched

# A call's requests, one for each table, or an error for all ranks to raise.
Asked = Sequence[Request] | Exception


class Route(Protocol):
    """A lookup that has begun, but has not changed any table yet."""

    plan: LookupPlan

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """Finish the lookup: return an output for each request, or raise one error on all ranks.

        If all requests share one output, a route may return only that output.
        """


def refused(tables: Sequence[EmbeddingTable], error: BaseException) -> Exception:
    """Return an error in a call's input, for `look_up` to raise on all ranks.

    An interrupt is raised immediately, but the call is counted first; otherwise other ranks would
    mistake this rank's next call for the interrupted one.
    """
    if isinstance(error, Exception):
        return error
    exchange = _exchange(tables)
    if exchange is not None:
        exchange.lookups += 1
    raise error


def look_up(cache: PlanCache, tables: Sequence[EmbeddingTable], asked: Asked) -> list[torch.Tensor]:
    """Look up keys in several layers together; return an output for each request.

    Args:
        cache: keeps the plan from call to call.
        tables: the layers' tables, the same ones in the same order on every rank.
        asked: a `Request` for each of the tables, or an error in the input, for all ranks to
            raise.
    """
    # Refuse before any collective: exporting a model on one rank would hang.
    if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined]
        refuse_recording(tables[0].name)
    exchange = _exchange(tables)
    if exchange is None:
        return _begin_here(cache, tables, asked).outputs()
    with exchange.lock:
        return _begin_on_ranks(exchange, cache, tables, asked).outputs()


def begin(cache: PlanCache, tables: Sequence[EmbeddingTable], asked: Asked) -> Route:
    """Begin `look_up`, without waiting for the keys to arrive.

    On a single rank, rows in files are prefetched. On CUDA the lookup waits for work already queued
    on the current stream, not for later work.
    """
    exchange = _exchange(tables)
    if exchange is None:
        here = _begin_here(cache, tables, asked)
        ask_ahead(here.plan, here.requests)
        return here
    with exchange.stream.ahead():
        return _begin_on_ranks(exchange, cache, tables, asked)


def finish(route: Route, error: Exception | None) -> list[torch.Tensor]:
    """Finish a lookup started by `begin`; see `Route.outputs`."""
    # Tables may have changed since the lookup began.
    plan, route.plan = route.plan, route.plan.up_to_date()
    batches = [[batch.positions for batch in one.batches] for one in (plan, route.plan)]
    if isinstance(route, ByKey) and batches[0] != batches[1]:
        names = ", ".join(dict.fromkeys(table.name for table in plan.tables))
        error = error or RuntimeError(
            f"{names}: some of these layers have changed their mode since their keys were "
            f"prefetched, and others have not; change all of them, or call the group first"
        )
    return route.outputs(error)


def _exchange(tables: Sequence[EmbeddingTable]) -> Exchange | None:
    # Most programs have a single rank, and this check is faster than asking a layer for its
    # exchange.
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return tables[0].process_exchange()


def _begin_here(cache: PlanCache, tables: Sequence[EmbeddingTable], asked: Asked) -> Local:
    # Use the requests' own plan if there is one: with hundreds of tables, checking again that the
    # cached plan fits them would take noticeable time.
    known = asked.plan if type(asked) is LazyRequests else None
    plan: LookupPlan = cache.plan_for(tables) if known is None else known
    if not plan.fits_alone:
        plan.check_exchange(None)
    if isinstance(asked, Exception):
        raise asked
    if watched:
        tell(tables, asked, plan.reads)
    return Local(plan, asked)


@dataclass
class _Redirected:
    """Redirects keys only when the lookup finishes, since earlier lookups may admit some keys."""

    plan: LookupPlan
    exchange: Exchange
    cache: PlanCache
    tables: Sequence[EmbeddingTable]
    asked: Asked

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """Finish the lookup; see `Route`."""
        with self.exchange.lock:
            asked = redirected(self.plan, self.exchange, error or self.asked)
            return _begin_on_ranks(
                self.exchange, self.cache, self.tables, asked, redirects=False
            ).outputs()


def _begin_on_ranks(
    exchange: Exchange,
    cache: PlanCache,
    tables: Sequence[EmbeddingTable],
    asked: Asked,
    redirects: bool = True,
) -> Route:
    # Count the lookup before anything can fail or be interrupted, so that the count is the same on
    # all ranks.
    exchange.lookups += 1

    made: ByKey | Exception
    try:
        plan = cache.plan_for(tables)
        plan.check_exchange(exchange)
        if plan.redirects and redirects:
            return _Redirected(plan, exchange, cache, tables, asked)
        made = ByKey(exchange, plan)
    except Exception as error:  # the handshake sends the error to the other ranks
        made = error
    if isinstance(made, ByKey) and made.of_plan in exchange.at_once:
        made.begin_at_once(asked)
        return made

    # If the input is invalid on any rank, raise an error on all ranks, before a table is changed.
    agreed = exchange.agree("look up", _proposal(exchange, made, asked))
    by_key, requests = cast(ByKey, made), cast("Sequence[Request]", asked)
    exchange.parts_saved = 0
    known = _take_known(by_key.plan, agreed)
    by_bag, sizes, saved = zip(*agreed.facts, strict=True)
    if any(saved):
        warn_of_parts_not_saved(saved)
    if all(by_bag):
        route = ByBag(exchange, by_key.signature, by_key.plan, requests, known)
        route.begin(sizes)
        return route
    by_key.begin(agreed, known)
    return by_key


def _proposal(exchange: Exchange, made: ByKey | Exception, asked: Asked) -> Proposal | Exception:
    if isinstance(made, Exception):
        return made
    if isinstance(asked, Exception):
        return asked
    try:
        made.ask(asked)
        facts = *_compare(made, asked), exchange.parts_saved
        return Proposal(made.signature, _with_known(made), facts)
    except Exception as error:
        return error


def _has_scores(plan: LookupPlan) -> bool:
    """Return whether any table has scores."""
    return any(batch.scored is not None for batch in plan.batches)


def _with_known(made: ByKey) -> torch.Tensor:
    """Return the key counts for each rank, and the facts that all ranks need to make room."""
    counts = made.counts
    if not _has_scores(made.plan):
        return counts
    columns = swept_columns(made.plan)
    if not columns:
        return counts
    known = known_here(swept_tables(made.plan), counts[:, columns].sum(0))
    return torch.cat([counts, known.to(counts.device).expand(len(counts), -1)], 1)


def _take_known(plan: LookupPlan, agreed: Agreement) -> list[Known]:
    """Remove the columns added by `_with_known` from all ranks' counts, and return the facts."""
    tables = swept_tables(plan) if _has_scores(plan) else []
    if not tables:
        return []
    last = agreed.counts.shape[1] - 2 * len(tables)
    known = known_of(tables, agreed.counts[:, last:])
    agreed.counts, agreed.own = agreed.counts[:, :last], agreed.own[:, :last]
    return known


def _compare(by_key: ByKey, requests: Sequence[Request]) -> tuple[int, int]:
    """Return (1, bytes to send to each rank) if this rank prefers the by-bag route, else (0, 0).

    Forward and backward send the same number of vectors, so only the forward is counted.
    """
    if by_key.plan.most_keys is not None:
        return 0, 0
    strategies = by_key.plan.strategies
    forced = "reduce_scatter" in strategies
    if "all_to_all" in strategies and not forced:
        return 0, 0
    # Decide most calls here, without inspecting the requests.
    if not forced and by_key.bytes_of_bags() >= by_key.bytes_to_move():
        return 0, 0
    if "all_to_all" in strategies or not all(map(can_go_by_bag, requests)):
        if forced:
            raise ValueError(
                f"{by_key.plan.tables[0].name}: strategy='reduce_scatter' pools on other ranks, "
                f"which goes neither with sample_weights that need a gradient nor in a group with "
                f"layers that do not add up or have strategy='all_to_all'"
            )
        return 0, 0
    for request in requests:
        request.check()
    if not forced and bytes_to_move(requests) >= by_key.bytes_to_move():
        return 0, 0
    return 1, payload_bytes(requests)
