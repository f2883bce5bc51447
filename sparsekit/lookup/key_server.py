"""The owner's side of the by-key route: sends vectors, and receives their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import numpy as np
import torch

from ..distributed.wire import Layout, Parts
from ..ops._group import GROUP_COMBINERS, FeatureColumn
from ..tables.embedding_table import EmbeddingTable
from .descriptors import Descriptors, no_offsets
from .plan import LookupPlan
from .record import LookupResult
from .request import OnDemand, Request, one_by_one
from .sweep import Asked
from .table_ops import run_into
from .user_scores import UserScores


class KeyServer:
    """Answers requests from all ranks for keys that this rank owns, without copying.

    It reads keys and gradients from the receive buffers, and writes vectors straight into the
    send buffers.

    Args:
        plan: the plan of the tables.
        come: the received parts with the keys.
        keys: layout of the keys in the parts.
        vectors: layout of the vectors, and of their gradients, in the parts.
        places: for each table, the number of places for its keys in each part; each part then
            begins with the number of keys for each table. None if all places are in use.
        counted: columns of the tables whose keys are followed by their occurrence counts.

    Attributes:
        user_scores: the scores that the user gives for keys.
    """

    def __init__(
        self,
        plan: LookupPlan,
        come: Parts,
        keys: Layout,
        vectors: Layout,
        places: Sequence[int] | None,
        counted: Sequence[int] = (),
    ) -> None:
        self.user_scores: UserScores = {}
        self._plan = plan
        self._counted = counted
        self._vectors = vectors
        payloads, begins = keys.payloads(come)
        self._keys = [payload.view(torch.int64) for payload in payloads]
        self._first = self._first_bags = self._words = begins // 8
        self._offsets = [no_offsets(self._keys[0].device)] * len(self._keys)
        if places is not None:
            # Treat each place as a bag, with one key if the place is in use, otherwise with none.
            counts = torch.stack([words[: len(places)] for words in self._keys])
            first, number, table = _bags_of_places(tuple(places), counts.device)
            offsets = first + torch.minimum(number, counts.index_select(1, table))
            self._offsets = list(offsets)
            behind_counts = self._first[0, 0]
            self._keys = [words[behind_counts:] for words in self._keys]
            self._first = self._first - behind_counts
            self._first_bags = self._first + np.arange(len(places))
        self._features: list[torch.Tensor] = []

    def answer(self, memory: Sequence[torch.Tensor], of_parts: Sequence[int]) -> LookupResult:
        """Write the vectors of all received keys; in training, insert new keys.

        Args:
            memory: for each of `LookupPlan.batches`, the buffer to write to.
            of_parts: byte offset of each rank's part in the exchange's buffer.
        """
        begins = self._vectors.begins(of_parts)
        asked = []
        for batch, columns in zip(self._plan.batches, self._plan.columns, strict=True):
            features = _features(
                self._vectors.counts[:, columns],
                self._first_bags[:, columns],
                begins[:, columns] // batch.wire_dtype.itemsize,
                batch.dims,
            )
            self._features.append(features)
            counts = self._vectors.counts[:, columns].T.tolist()
            limits = [(t, rank, n) for t, own in enumerate(counts) for rank, n in enumerate(own)]
            descriptors = Descriptors(
                *(self._keys, self._offsets, [], features, limits, [], 1),
                self._occurrences(columns),
            )
            asked.append((OnDemand(partial(self._requests, columns)), descriptors))
        return run_into(self._plan, asked, memory, self.user_scores)

    def _occurrences(self, columns: slice) -> torch.Tensor | None:
        """Return how often each entry's key occurred, int64; None if no table needs it."""
        own = range(self._vectors.counts.shape[1])[columns]
        if not any(column in own for column in self._counted):
            return None
        behind_keys = self._vectors.counts.shape[1]
        each = []
        for column in own:
            at = column
            if column in self._counted:
                at = behind_keys + self._counted.index(column)
            firsts, counts = self._words[:, at].tolist(), self._vectors.counts[:, column].tolist()
            for words, first, count in zip(self._keys, firsts, counts, strict=True):
                each.append(words[first : first + count])
        # Pad to the length of the other per-entry tensors; the padding is never read.
        each.append(each[0].new_empty(sum(map(len, self._keys)) - sum(map(len, each))))
        return torch.cat(each)

    def keys_of(self, table: EmbeddingTable) -> Asked:
        """Return a table's received keys and, if the table counts them, how often each occurred."""
        tables = [one for batch in self._plan.batches for one in batch.tables]
        own = slice(tables.index(table), tables.index(table) + 1)
        occurrences, keys = self._occurrences(own), self._requests(own)[0].keys
        return Asked(keys, None if occurrences is None else occurrences[: len(keys)])

    def features_at(self, of_parts: Sequence[int]) -> list[torch.Tensor]:
        """Return the features that `answer` used, adapted to parts at other byte offsets."""
        begins = self._vectors.begins(of_parts)
        features = []
        each = zip(self._plan.batches, self._plan.columns, self._features, strict=True)
        for batch, columns, of_answer in each:
            moved = of_answer.clone()
            moved[:, FeatureColumn.begin] = torch.from_numpy(
                (begins[:, columns] // batch.wire_dtype.itemsize).T.reshape(-1)
            )
            features.append(moved)
        return features

    def _requests(self, columns: slice) -> list[Request]:
        tables = [table for batch in self._plan.batches for table in batch.tables]
        made = []
        for t in range(len(tables))[columns]:
            parts = [
                keys[first : first + count]
                for keys, first, count in zip(
                    self._keys,
                    self._first[:, t].tolist(),
                    self._vectors.counts[:, t].tolist(),
                    strict=True,
                )
            ]
            made.append(one_by_one(tables[t], torch.cat(parts)))
        return made


@lru_cache(maxsize=64)
def _bags_of_places(places: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return, for each offset, its table's first place, its index in that table, and the table.

    A table with n places has n + 1 offsets. One final offset marks the end.
    """
    each = np.array([*places, 0])
    table = np.arange(len(each)).repeat([*(n + 1 for n in places), 1])
    first = (each.cumsum() - each)[table]
    number = np.arange(len(table)) - first - table
    table[-1] = 0
    return tuple(torch.from_numpy(made).to(device) for made in (first, number, table))


def _features(
    counts: np.ndarray, first: np.ndarray, begins: np.ndarray, dims: Sequence[int]
) -> torch.Tensor:
    """Return ``features`` for keys from all ranks: one row per table and rank, one bag per key."""
    world_size, tables = counts.shape
    column = np.empty((len(FeatureColumn), tables, world_size), dtype=np.int64)
    column[FeatureColumn.table] = np.arange(tables)[:, None]
    column[FeatureColumn.source] = np.arange(world_size)
    column[FeatureColumn.first_bag] = first.T
    column[FeatureColumn.bags] = counts.T
    column[FeatureColumn.combiner] = GROUP_COMBINERS["none"]
    column[FeatureColumn.max_nnz] = 1
    column[FeatureColumn.tensor] = 0
    column[FeatureColumn.begin] = begins.T
    column[FeatureColumn.stride] = np.array(dims)[:, None]
    return torch.from_numpy(column.reshape(len(FeatureColumn), -1).T.copy())
