"""Sends a layer's keys, each with its values, to the ranks that own them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from .. import ops
from ..distributed.exchange import Exchange, Proposal, attempt
from ..distributed.wire import pack, packed_sizes, unpack
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable


def signature_of(exchange: Exchange, layer: EmbeddingTable, what: str) -> str:
    """Return a string that identifies an operation on a layer, the same on all ranks.

    Raises:
        RuntimeError: the layer was made for a different set of ranks. Also raises the errors of
            `EmbeddingTable.signature`.
    """
    layer.check_ranks(exchange)
    seed, *shard = torch.cat([layer.seed, layer.shard]).tolist()
    of_layer = layer.signature(seed, shard, False)
    return f"{what} of {of_layer}, lookup number {exchange.lookups}"


class ToOwners:
    """Groups this rank's keys by owner, and agrees with the other ranks on key counts.

    Args:
        exchange: the exchange with the owners.
        layer: the layer of the keys.
        what: description of the operation, which must be the same on all ranks.
        keys: returns the keys, int64 ``[n]``; an error that it raises is raised on every rank.

    Attributes:
        keys: the keys, grouped by owner.
        order: position of each key in the input.
        own: number of keys to send to each rank.
        theirs: number of keys to receive from each rank.
        asked: total number of keys that all ranks pass.
        rows: total number of rows in use on all ranks if the table drops rows, else 0.
        signature: text that identifies this call, the same on all ranks.
    """

    def __init__(
        self,
        exchange: Exchange,
        layer: EmbeddingTable,
        what: str,
        keys: Callable[[], torch.Tensor],
    ) -> None:
        self._exchange = exchange
        # Count this call like a lookup, before anything can fail.
        exchange.lookups += 1

        def propose() -> Proposal:
            self.signature = signature_of(exchange, layer, what)
            self.keys, counts, self.order = ops.bucketize(keys(), exchange.world_size, layer.owners)
            sweeps = layer.life is not None and layer.life.sweeps
            rows = len(cast(HashTable, layer.table)) if sweeps else 0
            return Proposal(self.signature, counts.unsqueeze(1), (len(self.keys), rows, 0))

        agreed = exchange.agree(what, attempt(propose))
        self.asked, self.rows, _ = map(sum, zip(*agreed.facts, strict=True))
        self.own: list[int] = agreed.own[:, 0].tolist()
        self.theirs: list[int] = agreed.counts[:, 0].tolist()
        # Enlarge the receive buffers for all messages that may follow, before any of them can fail.
        for counts, like in ((self.theirs, self.keys), (self.theirs, layer.weight)):
            exchange.expect(packed_sizes([like], [counts]))
        exchange.expect(packed_sizes([layer.weight], [self.own]))

    def send(self, what: str, values: torch.Tensor) -> torch.Tensor:
        """Send the owners one value per key, in the order of `keys`; return the values received."""
        return exchanged(
            self._exchange,
            f"{what}: {self.signature}",
            lambda: values,
            self.own,
            self.theirs,
            values,
        )


def exchanged(
    exchange: Exchange,
    what: str,
    make: Callable[[], torch.Tensor],
    sent: Sequence[int],
    come: Sequence[int],
    like: torch.Tensor,
) -> torch.Tensor:
    """Send each rank the rows meant for it, and wait for the rows from all ranks.

    Args:
        exchange: the ranks' exchange.
        what: description of the data, which must be the same on all ranks.
        make: returns the rows to send, with the rows for rank 0 first; an error that it raises is
            raised on every rank.
        sent: number of rows to send to each rank.
        come: number of rows to receive from each rank.
        like: a tensor with the dtype of the rows and the shape of a row.

    Returns:
        The rows received from rank 0, then those from rank 1, and so on.
    """
    sizes = packed_sizes([like], [sent]), packed_sizes([like], [come])
    parts = exchange.send(what, lambda to: pack(to, [make()], [sent]), *sizes)()
    return unpack(parts, [like], [come])[0]
