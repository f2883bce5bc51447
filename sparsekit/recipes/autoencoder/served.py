"""Recommends items, using a snapshot's tables and a model's dense part."""

from __future__ import annotations

import math

import torch

from ...errors import check_int
from ...serving import Snapshot
from .model import Autoencoder
from .recommendations import USERS, Recommendations


@torch.no_grad()
def recommend_from(snapshot: Snapshot, model: Autoencoder, k: int = 10) -> Recommendations:
    """Find the k items with the highest scores for each user in the model's history.

    Unlike `recommend`, this reads all vectors from a snapshot, which may have int8 rows or follow a
    delta log. Candidates are the items in the snapshot that the user has not rated.

    Args:
        snapshot: snapshot of a model with the same settings, whose layers are named ``rated`` and
            ``scored``.
        model: model with the users' ratings and the dense part, on the CPU.
        k: number of items for each user.

    Raises:
        TypeError, ValueError: k is not an int in [1, 2^20]; or the snapshot lacks these tables, or
            their dim is not the model's.
    """
    k = check_int("recommend_from", "k", k, 1, 2**20)
    history, dim = model.history, len(model.bias)
    rated, scored = _table(snapshot, "rated", dim), _table(snapshot, "scored", 1 + dim)
    items = torch.zeros(len(history.users), k, dtype=torch.int64, device="cpu")
    scores = torch.full((len(history.users), k), -math.inf, device="cpu")
    with snapshot.pin() as pinned:
        for rows in torch.arange(len(history.users), device="cpu").split(USERS):
            entries, offsets, _ = history(rows)
            keys = history.items[history.columns[entries]]
            weights = history.weights()[entries]
            codes = model.codes_of(pinned.lookup(rated, keys, offsets, weights, "sqrtn"))
            for row, code, own in zip(
                rows.tolist(), codes, keys.tensor_split(offsets[1:-1]), strict=True
            ):
                found, values = pinned.top_k(scored, code, k + len(own))
                new = ~torch.isin(found, own)
                best = found[new][:k]
                items[row, : len(best)], scores[row, : len(best)] = best, values[new][:k]
    return Recommendations(history.users, items, scores)


def _table(snapshot: Snapshot, name: str, dim: int) -> str:
    """Return the name of a layer's table in the snapshot."""
    for each, info in snapshot.tables.items():
        if each.rpartition(".")[2] == name:
            if info.dim != dim:
                raise ValueError(
                    f"{snapshot.path}: table {each} has dim {info.dim}, but the model needs {dim}"
                )
            return each
    raise ValueError(f"{snapshot.path}: no table of a layer named {name}")
