"""The by-key route: each rank gets the vectors of its distinct keys and pools them itself.

A rank sends its distinct keys to their owners. Each owner sends back the vectors in the order of
the keys, and the rank pools them straight from the receive buffer. Backward sends the gradients of
these vectors to their owners, which add up the gradients from all ranks for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from .._reports import DEFERRING_DEVICES, reports_of
from ..distributed.exchange import Agreement, Exchange
from ..distributed.wire import ALIGNMENT, Layout, Parts
from .key_client import KeyClient
from .key_server import KeyServer
from .make_room import Known, make_room_on_ranks, still_inserting
from .plan import LookupPlan
from .record import LookupRecord
from .request import Request
from .rows import exchange_rows
from .scored import tables_by_user
from .second import Gradients, differentiable
from .unpooled import as_vectors
from .user_scores import inserting, scores_on_ranks


class ByKey:
    """One lookup by key in several tables: this rank requests vectors from its keys' owners.

    Args:
        exchange: the exchange with the owners.
        plan: the plan of the tables.

    Attributes:
        of_plan: the signature of the plan.
        signature: text that identifies the call, the same on all ranks.
        counts: after `ask`, the number of keys that this rank requests from each rank, int64
            ``[world_size, tables]``.

    Raises:
        RuntimeError, ValueError: see `LookupPlan.signature`.
    """

    def __init__(self, exchange: Exchange, plan: LookupPlan) -> None:
        self.exchange = exchange
        self.plan = plan
        self.of_plan = plan.signature()
        self.signature = f"look up in {self.of_plan}, lookup number {exchange.lookups}"
        self._clients: list[KeyClient] = []
        self._requests: Sequence[Request] = []
        self._row_bytes = [row for batch in plan.batches for row in batch.row_bytes]
        # For each table, the number of places for its keys in each message; None if messages are
        # only as large as their content. On a device all messages have fixed sizes if all tables
        # limit their keys, since reading a count would make the host wait.
        on_device = exchange.device.type in DEFERRING_DEVICES
        self._places = plan.most_keys if on_device else None
        # Layout of the keys from all ranks. With max_keys_per_rank and without fixed places, it is
        # known only when the keys arrive.
        self._keys: Layout | None = None
        self._known: Sequence[Known] = ()
        # Columns of the tables whose owners must know how often each key occurred.
        self._counted: list[int] = []

    def ask(self, requests: Sequence[Request]) -> None:
        """Store the call's requests, and group their distinct keys by owner.

        Raises:
            IndexError, ValueError, TableFullError: a deferred error from an earlier lookup.
            TypeError, ValueError, IndexError: keys or offsets are not valid for a table, or a
                rank would get more distinct keys than max_keys_per_rank.
        """
        reports = reports_of(self.exchange.device)
        if reports is not None:  # from here on, other ranks are waiting for this one
            reports.poll()
        if self._places is not None:
            self._check_places(self._places)
        self._requests = requests
        asked, self._finished = as_vectors(requests)
        for batch, columns in zip(self.plan.batches, self.plan.columns, strict=True):
            own = asked
            if len(self.plan.batches) > 1:
                own = [asked[i] for i in batch.positions]
            places = () if self._places is None else self._places[columns]
            self._clients.append(KeyClient(batch, own, self.exchange.world_size, places))
        counts = [client.counts for client in self._clients]
        self.counts = counts[0] if len(counts) == 1 else torch.cat(counts, 1)
        if self.plan.most_keys is not None and self._places is None:
            self._own_counts = np.array(self.counts.tolist())
            self._refuse_more_than(self.plan.most_keys)

    def bytes_to_move(self) -> int:
        """Return how many bytes the forward pass exchanges with other ranks, excluding heads."""
        others, world_size = self.exchange.world_size - 1, self.exchange.world_size
        keys = self.counts.sum(0).tolist()
        return sum(
            count * (8 + row) * others // world_size
            for count, row in zip(keys, self._row_bytes, strict=True)
        )

    def bytes_of_bags(self) -> int:
        """Return the size in bytes of the sums that the by-bag route would send."""
        others = self.exchange.world_size - 1
        return sum(client.bytes_of_bags() * others for client in self._clients)

    def begin(self, agreed: Agreement, known: Sequence[Known] = ()) -> None:
        """Send the keys.

        Args:
            agreed: the counts that all ranks have agreed on.
            known: facts about `swept_tables` that all ranks know from the handshake.
        """
        self._known = known
        exchange, most = self.exchange, self.plan.most_keys
        if most is not None:
            # From now on, parts of this size may arrive without a handshake.
            exchange.expect([self._size_at_once(most)] * exchange.world_size)
            exchange.at_once.add(self.of_plan)
        if self._places is not None:
            return self._send_places(self._places)
        of_batches = zip(self.plan.batches, self.plan.columns, strict=True)
        self._counted = [own.start + t for batch, own in of_batches for t in batch.counted]
        own_keys, self._keys = (self._keys_layout(n) for n in (agreed.own, agreed.counts))

        def write(parts: Parts) -> None:
            self._write_keys(parts, own_keys)
            self._write_occurrences(parts, own_keys)

        sizes = own_keys.sizes, self._keys.sizes
        self._received = exchange.send(f"keys: {self.signature}", write, *sizes, late=True)
        self._own, self._theirs = self._expected(agreed.own), self._expected(agreed.counts)

    def begin_at_once(self, requests: Sequence[Request] | Exception) -> None:
        """Send the keys and their counts together, in parts of a size that all ranks know.

        Args:
            requests: the requests, or an error for all ranks to raise in `outputs`.
        """
        most, exchange = cast("list[int]", self.plan.most_keys), self.exchange
        if self._places is not None:
            return self._send_places(self._places, requests)
        size = self._size_at_once(most)

        def write(parts: Parts) -> None:
            if isinstance(requests, Exception):
                raise requests
            self.ask(requests)
            self._write_counts(parts)
            self._own = self._expected(self._own_counts)
            self._write_keys(parts, self._behind_counts(self._own_counts))

        sizes = [size] * exchange.world_size
        what = f"keys at once: {self.signature}"
        self._received = exchange.send(what, write, sizes, sizes, words=len(most))

    def _send_places(
        self, places: list[int], requests: Sequence[Request] | Exception | None = None
    ) -> None:
        """Call `ask` if requests are given; then send counts and keys in fixed-size messages.

        Other ranks carry on before they read the heads, so an error ends the exchange.
        """
        exchange = self.exchange
        counts = np.tile(places, (exchange.world_size, 1))
        self._keys = layout = self._behind_counts(counts)

        def write(parts: Parts) -> None:
            if isinstance(requests, Exception):
                raise requests
            if requests is not None:
                self.ask(requests)
            self._write_counts(parts)
            self._write_keys(parts, layout)

        what = f"places of keys: {self.signature}"
        self._received = exchange.send(what, write, layout.sizes, layout.sizes, late=True)
        self._own = self._theirs = self._expected(counts)

    def _write_counts(self, parts: Parts) -> None:
        for rank, counts in enumerate(self.counts):
            parts.payload(rank, 8 * len(counts)).view(torch.int64)[:] = counts

    def _size_at_once(self, most: Sequence[int]) -> int:
        """Return the size in bytes of a part with counts and up to `most` keys for each table."""
        return self._behind_counts(np.array([most])).sizes[0]

    def _behind_counts(self, counts: np.ndarray) -> Layout:
        """Return the layout of parts that contain key counts, followed by the keys."""
        tables = len(self._row_bytes)
        return Layout(counts, [8] * tables, words=tables)

    def _write_keys(self, parts: Parts, keys: Layout) -> None:
        for client, columns in zip(self._clients, self.plan.columns, strict=True):
            client.write_keys(parts, keys, columns)

    def _keys_layout(self, counts: np.ndarray) -> Layout:
        """Return the layout of parts with keys, followed by occurrence counts for some tables."""
        tables = len(self._row_bytes) + len(self._counted)
        return Layout(np.concatenate([counts, counts[:, self._counted]], axis=1), [8] * tables)

    def _write_occurrences(self, parts: Parts, keys: Layout) -> None:
        for number, column in enumerate(self._counted):
            for client, columns in zip(self._clients, self.plan.columns, strict=True):
                if columns.start <= column < columns.stop:
                    at = len(self._row_bytes) + number
                    client.write_occurrences(parts, keys, column - columns.start, at)

    def _expected(self, counts: np.ndarray) -> Layout:
        """Return the layout of vectors or gradients for `counts` keys; prepare to receive them."""
        layout = Layout(counts, self._row_bytes, ALIGNMENT)
        self.exchange.expect(layout.sizes)
        return layout

    def _check_places(self, places: list[int]) -> None:
        world_size = self.exchange.world_size
        if sum(places) * world_size < 1 << 31:
            return
        most = max(places)
        table = [table for batch in self.plan.batches for table in batch.tables][places.index(most)]
        raise ValueError(
            f"{table.name}: max_keys_per_rank {most} is too large for a device: {world_size} ranks "
            f"times the sum of all layers, {sum(places)}, must be below 2**31"
        )

    def _refuse_more_than(self, most: Sequence[int]) -> None:
        counts = self._own_counts
        if (counts <= most).all():
            return
        rank, t = np.argwhere(counts > most)[0]
        table = [table for batch in self.plan.batches for table in batch.tables][t]
        raise ValueError(
            f"{table.name}: {counts[rank, t]} distinct keys for rank {rank}, but "
            f"max_keys_per_rank is {most[t]}; set a larger one on all ranks, or None for no limit"
        )

    def outputs(self, error: Exception | None = None) -> list[torch.Tensor]:
        """Finish the lookup; see `Route`."""
        exchange = self.exchange
        come = self._received()
        if self._keys is None:
            own = self._own_counts[exchange.rank]
            counts = np.insert(come.words, exchange.rank, own, axis=0)
            self._keys, self._theirs = self._behind_counts(counts), self._expected(counts)
        server = KeyServer(self.plan, come, self._keys, self._theirs, self._places, self._counted)
        batches = self.plan.batches
        by_user = tables_by_user(batches) if any(x.scored is not None for x in batches) else []
        if by_user:
            requests = inserting(self._requests, self.plan.reads)
            given = by_user, server.keys_of, exchange, self.signature, requests, error
            server.user_scores = scores_on_ranks(*given)
        if self._known and error is None:
            error = make_room_on_ranks(
                still_inserting(self._known), server.keys_of, exchange, self.signature
            )
        layouts = self._theirs, self._own
        what = f"vectors: {self.signature}"
        rows, (_, record, found) = exchange_rows(
            exchange, what, self.plan, error or server.answer, *layouts
        )
        way_back = _WayBack(
            exchange, self.signature, self.plan, self._clients, *layouts, server, record
        )
        outputs = way_back.pooled(*rows)
        weights = record.autograd_inputs
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            outputs = list(_Outputs.apply(way_back, found, outputs, *weights))
        return self._finished(outputs)


@dataclass(frozen=True)
class _WayBack:
    """The state that a lookup needs to pool its outputs and to send gradients back."""

    exchange: Exchange
    signature: str
    plan: LookupPlan
    clients: list[KeyClient]
    theirs: Layout
    own: Layout
    server: KeyServer
    record: LookupRecord

    def pooled(self, come: list[torch.Tensor], begins: Sequence[int]) -> list[torch.Tensor]:
        """Return an output for each request, or a single output with columns for all requests."""
        outputs: dict[int, torch.Tensor] = {}
        joined: list[torch.Tensor] = []
        for client, columns, rows in zip(self.clients, self.plan.columns, come, strict=True):
            outs = client.pool(rows, begins, self.own, columns, joined)
            if client.width is not None:
                joined = outs
            else:
                outputs.update(zip(client.batch.positions, outs, strict=True))
        return joined or [outputs[i] for i in range(len(outputs))]

    def gradients(
        self, grads: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[int]]:
        """Send gradients to the owners, and return the gradients received; see `exchange_rows`."""

        def write(memory: list[torch.Tensor], begins: Sequence[int]) -> None:
            for client, columns, rows in zip(self.clients, self.plan.columns, memory, strict=True):
                client.write_gradients(rows, begins, self.own, columns, grads)

        what = f"gradients: {self.signature}"
        return exchange_rows(self.exchange, what, self.plan, write, self.own, self.theirs)[0]


class _Outputs(torch.autograd.Function):
    """Autograd function for a call's outputs; backward sends gradients to the owners."""

    @staticmethod
    def forward(
        ctx: Any,
        way_back: _WayBack,
        found: list[torch.Tensor | None],
        outputs: list[torch.Tensor],
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.way_back = way_back
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*found)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        way_back: _WayBack = ctx.way_back
        exchange, found = way_back.exchange, ctx.saved_tensors
        record = way_back.record

        def make(grads: Gradients) -> Gradients:
            with exchange.lock, exchange.alone():
                memory, begins = way_back.gradients(grads)
                features = way_back.server.features_at(begins)
                return record.gradients_at(memory, found, features)

        def again(of_gradients: Gradients) -> Gradients:
            return record.pooled_again(of_gradients, grads, found)

        return None, None, None, *differentiable(make, again, grads)
