"""Reports the size and load of embedding tables while a model trains."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..distributed import Exchange
from ..tables.embedding_table import EmbeddingTable
from ..tables.life import RowCounts

# Maximum number of buckets to inspect, since a table may have millions of them.
SAMPLED_LINES = 4096
# Maximum number of rows to sample for ages and scores, since there may be millions of rows.
SAMPLED_ROWS = 4096
# Counts in `RowCounts` whose growth since the last report is reported.
FLOWS = ("inserted", "admitted", "refused", "evicted", "expired")


class Telemetry:
    """Computes these statistics for each embedding table in a model, over all ranks:

    - ``rows``: number of keys; ``capacity``: number of keys that there is room for now; ``load``:
      rows / capacity.
    - ``new_rows_per_step``: average number of new rows per step since the last call to `read`.
    - ``skew``: largest number of rows on a rank, divided by the mean over ranks.
    - ``full_lines``: fraction of full buckets among the first 4,096 buckets of the hash table on
      each rank. A bucket has space for 5 keys. A lookup that does not find its key in a full bucket
      continues in the next bucket.

    Without a hash table, only the capacity is reported. For a table whose rows have scores, also:

    - ``inserted``, ``admitted``, ``refused``, ``evicted``, ``expired``: counts since the last call
      to `read`; see `RowCounts`.
    - ``hit_rate``: fraction of the keys looked up in training since the last call that had a row
      before their lookup. A key counts once per lookup of the table, even if it occurs several
      times or on several ranks. None if there was no lookup. Not reported on CUDA.
    - ``age_deciles``, ``score_deciles``, at the end of an epoch: minimum, deciles and maximum of
      rows' ages (units of the table's clock since their last lookup in training) and scores (as in
      `Evicted`), estimated from at most 4,096 rows on each rank.

    Args:
        model: a model that contains sparsekit layers.
    """  # noqa: D400, D415  a list

    def __init__(self, model: torch.nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, EmbeddingTable)]
        self._layers = {layer.name: layer for layer in layers}
        self._rows = dict.fromkeys(self._layers, 0)
        self._counts = dict.fromkeys(self._layers, [0.0] * len(RowCounts._fields))
        self._steps = self._bytes_sent = 0
        self._last: dict[str, dict[str, Any]] = {}

    def read(
        self, steps: int, exchange: Exchange | None, epoch_ends: bool = False
    ) -> dict[str, dict[str, Any]]:
        """Return the statistics for each table, by layer name. A collective on several ranks.

        If there has been no step since the last call, the same statistics are returned again.

        Args:
            steps: number of updates so far.
            exchange: connection to the other ranks; None for a single rank.
            epoch_ends: whether to add the deciles of ages and scores.
        """
        if not self._layers:
            return {}
        since = steps - self._steps
        if since or not self._last:
            self._steps = steps
            self._last = self._read(since, exchange)
        if epoch_ends:
            deciles = self._deciles(exchange)
            return {name: {**self._last[name], **deciles.get(name, {})} for name in self._last}
        return self._last

    def _read(self, since: int, exchange: Exchange | None) -> dict[str, dict[str, Any]]:
        # [tables, 12]: rows (-1 without a hash table), capacity, full buckets per million, and
        # `RowCounts`.
        here = torch.tensor([_here(layer) for layer in self._layers.values()], dtype=torch.int64)
        of_ranks = _of_ranks(here, exchange).double()
        figures: dict[str, dict[str, Any]] = {}
        for i, (name, layer) in enumerate(self._layers.items()):
            rows, capacity, full, *counts = of_ranks[:, i].T
            figures[name] = {"capacity": capacity.sum().item()}
            if rows[0] >= 0:
                total = rows.sum().item()
                figures[name] |= {
                    "rows": total,
                    "load": total / capacity.sum().item(),
                    "new_rows_per_step": (total - self._rows[name]) / max(since, 1),
                    "skew": (rows.max() / rows.mean()).item() if total else 1.0,
                    "full_lines": full.mean().item() / 1e6,
                }
                self._rows[name] = int(total)
            if layer.life is not None:
                figures[name] |= self._of_life(layer, [count.sum().item() for count in counts])
        return figures

    def _of_life(self, layer: EmbeddingTable, counts: list[float]) -> dict[str, float | None]:
        """Return how much a table's counts have grown since the last call, and its hit rate."""
        before, self._counts[layer.name] = self._counts[layer.name], counts
        grown = [now - then for now, then in zip(counts, before, strict=True)]
        since = dict(zip(RowCounts._fields, grown, strict=True))
        figures: dict[str, float | None] = {name: since[name] for name in FLOWS}
        if layer.weight.is_cpu:
            figures["hit_rate"] = since["found"] / since["asked"] if since["asked"] else None
        return figures

    def _deciles(self, exchange: Exchange | None) -> dict[str, dict[str, list[int]]]:
        """Return the deciles of ages and scores for each table whose rows have scores."""
        living = [layer for layer in self._layers.values() if layer.life is not None]
        if not living:
            return {}
        of_ranks = _of_ranks(torch.stack([_sample(layer) for layer in living]), exchange)
        found = {}
        for i, layer in enumerate(living):
            rows, sampled = of_ranks[:, i, :2].T.tolist()
            values = [
                part[i, 2 : 2 + 2 * n].view(2, n) for part, n in zip(of_ranks, sampled, strict=True)
            ]
            weights = [
                torch.full((n,), total / max(n, 1), dtype=torch.float64)
                for total, n in zip(rows, sampled, strict=True)
            ]
            ages, scores = torch.cat(values, 1)
            found[layer.name] = {
                "age_deciles": _weighted_deciles(ages, torch.cat(weights)),
                "score_deciles": _weighted_deciles(scores, torch.cat(weights)),
            }
        return found

    def bytes_sent(self, exchange: Exchange | None) -> int:
        """Return the number of bytes this rank has sent for lookups since the last call."""
        total = 0 if exchange is None else exchange.bytes_sent
        since, self._bytes_sent = total - self._bytes_sent, total
        return since


def _of_ranks(here: torch.Tensor, exchange: Exchange | None) -> torch.Tensor:
    """Return the tensors from all ranks, ``[world_size, *shape]`` on the CPU."""
    if exchange is None:
        return here.unsqueeze(0)
    here = here.to(exchange.device)
    parts = [torch.empty_like(here) for _ in range(exchange.world_size)]
    dist.all_gather(parts, here, group=exchange.group)
    return torch.stack(parts).cpu()


def _sample(layer: EmbeddingTable) -> torch.Tensor:
    """Return one tensor: the row and sample counts, then the sample's ages and scores."""
    sample = torch.zeros(2 + 2 * SAMPLED_ROWS, dtype=torch.int64)
    life, scores, clock, table = layer.life, layer.scores, layer.clock, layer.table
    if life is None or scores is None or clock is None or table is None:
        return sample
    rows, now = len(table), life.now(clock)
    # Row numbers follow the order in which keys arrived, so sample evenly spaced rows.
    places = (
        torch.arange(SAMPLED_ROWS) * rows // SAMPLED_ROWS
        if rows > SAMPLED_ROWS
        else torch.arange(rows)
    )
    words, count = scores[places.to(scores.device)].cpu(), len(places)
    ages = now - life.score.touched(words)
    sample[:2] = torch.tensor([rows, count])
    sample[2 : 2 + 2 * count] = torch.cat([ages, life.score.order(words, now)])
    return sample


def _weighted_deciles(values: torch.Tensor, weights: torch.Tensor) -> list[int]:
    """Return the weighted minimum, deciles and maximum; empty if there are no values."""
    if len(values) == 0:
        return []
    ordered, order = values.sort()
    sums = weights[order].cumsum(0)
    tenths = sums[-1] * torch.arange(11, dtype=torch.float64) / 10
    places = torch.searchsorted(sums, tenths).clamp(max=len(values) - 1)
    found: list[int] = ordered[places].tolist()
    return found


def _here(layer: EmbeddingTable) -> tuple[int, ...]:
    counts = (0,) * len(RowCounts._fields)
    if layer.table is None:
        return -1, layer.capacity, 0, *counts
    if layer.life is not None:
        counts = layer.life.row_counts(len(layer.table), layer.weight.is_cpu)
    buckets, _, _ = layer.table.tensors()
    # A bucket has 5 int64 keys and 5 int32 rows; row -1 marks a free place. See ops.hash_table.
    rows = buckets[:SAMPLED_LINES, 5:].contiguous().view(torch.int32)[:, :5]
    full = (rows >= 0).all(1).double().mean()
    return len(layer.table), layer.table.capacity, int(full * 1_000_000), *counts
