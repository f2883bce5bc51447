"""Calls the functions that score keys, and writes what they have returned."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from .. import ops
from ..distributed.exchange import Exchange, Proposal, attempt
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.init_function import function_name
from ..tables.scores import MOST_SCORE, UserScore
from .make_room import Asked, Keys, life_of


class KeyScores(NamedTuple):
    """Distinct keys that are about to be looked up in a table, and their scores.

    Attributes:
        keys: int64 ``[n]``.
        scores: int64 ``[n]`` in [0, 2^32).
    """

    keys: torch.Tensor
    scores: torch.Tensor


UserScores = dict[EmbeddingTable, KeyScores]


def scores_of_keys(tables: Sequence[EmbeddingTable], keys: Keys) -> UserScores:
    """Call the functions of tables, before a lookup changes anything.

    Args:
        tables: tables whose scores a function returns.
        keys: returns the keys of a table that this rank owns.

    Raises:
        RuntimeError: a function has raised.
        TypeError, ValueError: a function has returned anything but scores.
    """
    return {table: _scored(table, keys(table)) for table in tables}


def scores_on_ranks(
    tables: Sequence[EmbeddingTable],
    keys: Keys,
    exchange: Exchange,
    signature: str,
    error: Exception | None = None,
) -> UserScores:
    """Call the functions of tables on all ranks; raise an error of one rank on all of them.

    Args:
        tables: tables whose scores a function returns, the same on all ranks.
        keys: returns the keys of a table that this rank owns, from all ranks.
        exchange: the exchange of the ranks.
        signature: text that identifies the lookup, the same on all ranks.
        error: an error of this rank, which the other ranks do not know yet.
    """
    made: UserScores = {}
    what = f"score keys: {signature}"

    def score() -> Proposal:
        made.update(scores_of_keys(tables, keys))
        nothing = torch.empty(exchange.world_size, 0, dtype=torch.int64, device=exchange.device)
        return Proposal(what, nothing)

    exchange.agree(what, error or attempt(score))
    return made


def score_writes(
    table: EmbeddingTable, scored: KeyScores, words: torch.Tensor, now: int
) -> partial[Any]:
    """Return the call that writes the scores of the keys that have rows.

    Args:
        table: the table, in which the lookup has found its keys.
        scored: the keys of the lookup.
        words: the table's scores.
        now: its clock.
    """
    rows = cast(HashTable, table.table).find(scored.keys)
    known = (rows >= 0).nonzero().squeeze(1)
    return partial(
        torch.Tensor.index_copy_, words, 0, rows[known], scored.scores[known] << 32 | now
    )


@torch.no_grad()
def _scored(table: EmbeddingTable, asked: Asked) -> KeyScores:
    keys, occurrences, _ = asked
    # Keys that are only read come 0 times.
    distinct = ops.unique(keys if occurrences is None else keys[occurrences > 0])[0]
    if table.fallback is not None:
        distinct = distinct[~table.fallback.has(distinct)]
    if not len(distinct):
        return KeyScores(distinct, distinct)
    score = cast(UserScore, life_of(table).score)
    named = f"{table.name}: score function {function_name(score.function)}"
    try:
        scores: object = score.function(distinct.clone())
    except Exception as error:
        raise RuntimeError(f"{named} raised {type(error).__name__}: {error}") from error
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"{named} must return a tensor, got {type(scores).__name__}")
    if scores.dtype != torch.int64:
        raise TypeError(f"{named} must return int64 scores, got {scores.dtype}")
    if scores.shape != distinct.shape or scores.device != distinct.device:
        raise ValueError(
            f"{named} must return a score for each of {len(distinct)} keys, of shape "
            f"{tuple(distinct.shape)} on {distinct.device}, got shape {tuple(scores.shape)} on "
            f"{scores.device}"
        )
    outside = ((scores < 0) | (scores > MOST_SCORE)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ValueError(
            f"{named} must return scores in [0, 2^32), got {int(scores[at])} for key "
            f"{int(distinct[at])}"
        )
    return KeyScores(distinct, scores)
