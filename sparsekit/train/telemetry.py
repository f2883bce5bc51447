"""Reports the size and load of embedding tables while a model trains."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..distributed import Exchange
from ..tables.embedding_table import EmbeddingTable

# Maximum number of buckets to inspect, since a table may have millions of them.
SAMPLED_LINES = 4096


class Telemetry:
    """Computes these statistics of each embedding table of a model, over all ranks:

    - ``rows``: number of keys; ``capacity``: largest number of keys; ``load``: rows / capacity.
    - ``new_rows_per_step``: average number of new rows per step since the last call of `read`.
    - ``skew``: largest number of rows on a rank, divided by the mean over ranks.
    - ``full_lines``: fraction of full buckets among the first 4,096 buckets of the hash table on
      each rank. A bucket has space for 5 keys. A lookup that does not find its key in a full bucket
      continues in the next bucket.

    Without a hash table, only the capacity is reported.

    Args:
        model: a model that contains sparsekit layers.
    """  # noqa: D400, D415  a list

    def __init__(self, model: torch.nn.Module) -> None:
        layers = [layer for layer in model.modules() if isinstance(layer, EmbeddingTable)]
        self._layers = {layer.name: layer for layer in layers}
        self._rows = dict.fromkeys(self._layers, 0)
        self._steps = self._bytes_sent = 0
        self._last: dict[str, dict[str, float]] = {}

    def read(self, steps: int, exchange: Exchange | None) -> dict[str, dict[str, float]]:
        """Return the statistics of each table, by layer name. A collective on several ranks.

        Args:
            steps: number of updates so far.
            exchange: connection to the other ranks; None for a single rank.
        """
        if not self._layers:
            return {}
        if (since := steps - self._steps) == 0 and self._last:
            return self._last
        self._steps = steps
        # [tables, 3]: rows (-1 without a hash table), capacity, and full buckets per million.
        here = torch.tensor([_here(layer) for layer in self._layers.values()], dtype=torch.int64)
        parts = [here]
        if exchange is not None:
            here = here.to(exchange.device)
            parts = [torch.empty_like(here) for _ in range(exchange.world_size)]
            dist.all_gather(parts, here, group=exchange.group)
        of_ranks = torch.stack(parts).cpu().double()
        figures = {}
        for i, name in enumerate(self._layers):
            rows, capacity, full = of_ranks[:, i].T
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
        self._last = figures
        return figures

    def bytes_sent(self, exchange: Exchange | None) -> int:
        """Return the number of bytes this rank has sent for lookups since the last call."""
        total = 0 if exchange is None else exchange.bytes_sent
        since, self._bytes_sent = total - self._bytes_sent, total
        return since


def _here(layer: EmbeddingTable) -> tuple[int, int, int]:
    if layer.table is None:
        return -1, layer.capacity, 0
    buckets, _, _ = layer.table.tensors()
    # A bucket has 5 int64 keys and 5 int32 rows; row -1 marks a free place. See ops.hash_table.
    rows = buckets[:SAMPLED_LINES, 5:].contiguous().view(torch.int32)[:, :5]
    full = (rows >= 0).all(1).double().mean()
    return len(layer.table), layer.capacity, int(full * 1_000_000)
