"""Scores from the user, returned by a function of the keys or passed along with a call's keys."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from .. import ops
from ..distributed.exchange import Exchange, Proposal, attempt
from ..distributed.wire import pack, packed_sizes, unpack
from ..tables.embedding_table import EmbeddingTable
from ..tables.hash_table import HashTable
from ..tables.scores import MOST_SCORE, UserScore
from .feature_matrix import is_scipy_csr
from .make_room import Keys
from .request import Request
from .sweep import Asked, life_of


class KeyScores(NamedTuple):
    """Distinct keys that are about to be looked up in a table, and their scores.

    Attributes:
        keys: int64 ``[n]``.
        scores: int64 ``[n]`` in [0, 2^32).
    """

    keys: torch.Tensor
    scores: torch.Tensor


UserScores = dict[EmbeddingTable, KeyScores]


def beside(request: Request, inputs: Any, scores: Any) -> Request:
    """Store scores passed along with a request's keys in the request, and return the request.

    Args:
        request: the request for these inputs.
        inputs: the keys, in any form that a layer accepts.
        scores: an int64 score for each key, flat or in the shape of a dense tensor of keys.

    Raises:
        TypeError, ValueError: the table does not have score='given', or the scores are not valid.
    """
    life = request.table.life
    if life is None or life.score != UserScore(None):
        raise ValueError(f"{request.name}: scores needs a layer with score='given'")
    if isinstance(inputs, torch.Tensor) and inputs.layout == torch.sparse_csr:
        floats = inputs.is_floating_point()  # true for a feature matrix
        keys: Any = inputs.col_indices() if floats else inputs.values()
    elif isinstance(inputs, torch.Tensor) and inputs.layout == torch.sparse_coo:
        keys = inputs._values()
    elif isinstance(inputs, torch.Tensor) and not inputs.is_nested:
        keys = inputs
    elif isinstance(inputs, (tuple, list)):
        keys = inputs[0]
    elif is_scipy_csr(inputs):
        keys = torch.from_numpy(inputs.indices).to(request.table.weight.device)
    else:
        keys = inputs.values()
    flat = keys.reshape(-1)
    _check(f"{request.name}: scores must be", scores, (flat.shape, keys.shape), flat)
    request.scores = flat.to(torch.int64), scores.reshape(-1)
    return request


def inserting(requests: Sequence[Request], reads: Sequence[bool]) -> Sequence[Request]:
    """Return the requests that may insert keys; `reads` marks the read-only ones, or is empty."""
    if not reads:
        return requests
    return [request for request, read in zip(requests, reads, strict=True) if not read]


def scores_of_keys(
    tables: Sequence[EmbeddingTable], keys: Keys, requests: Sequence[Request] | None = None
) -> UserScores:
    """Return scores for keys, before a lookup changes anything.

    Args:
        tables: tables whose scores come from the user.
        keys: returns, for a table, the keys that this rank owns.
        requests: the requests, with any scores passed along with their keys. If None, there are no
            requests, and rows keep their scores.

    Raises:
        RuntimeError: a score function has raised an error.
        TypeError, ValueError: a score function has not returned valid scores, or a call lacks
            scores for its keys.
    """
    return {
        table: _returned(table, keys(table))
        if requests is None or not _is_given(table)
        else _among(table, *_pairs(table, requests), keys(table))
        for table in tables
    }


def scores_on_ranks(
    tables: Sequence[EmbeddingTable],
    keys: Keys,
    exchange: Exchange,
    signature: str,
    requests: Sequence[Request] | None = None,
    error: Exception | None = None,
) -> UserScores:
    """Return scores as `scores_of_keys` does; raise an error from any rank on all ranks.

    Args:
        tables: tables whose scores come from the user, the same on all ranks.
        keys: returns, for a table, the keys from all ranks that this rank owns.
        exchange: the ranks' exchange.
        signature: text that identifies the lookup, the same on all ranks.
        requests: this rank's requests; see `scores_of_keys`.
        error: an error on this rank that the other ranks do not know about yet.
    """
    given = [] if requests is None else [table for table in tables if _is_given(table)]
    others = [table for table in tables if table not in given]
    made: UserScores = {}
    pairs: list[torch.Tensor] = []  # for each table: keys grouped by owner, and scores
    what = f"score keys: {signature}"

    def score() -> Proposal:
        made.update(scores_of_keys(others, keys))
        nothing = torch.empty(exchange.world_size, 0, dtype=torch.int64, device=exchange.device)
        counts = [nothing]
        for table in given:
            own, scores = _highest(*_pairs(table, cast("Sequence[Request]", requests)))
            grouped, of_ranks, order = ops.bucketize(own, exchange.world_size, table.owners)
            pairs.extend((grouped, scores[order]))
            counts += [of_ranks.unsqueeze(1)] * 2
        return Proposal(what, torch.cat(counts, 1))

    agreed = exchange.agree(what, error or attempt(score))
    if not given:
        return made
    own, come = agreed.own.T.tolist(), agreed.counts.T.tolist()
    sizes = packed_sizes(pairs, own), packed_sizes(pairs, come)
    for each in sizes:
        exchange.expect(each)
    parts = exchange.send(f"scores: {signature}", lambda to: pack(to, pairs, own), *sizes)()
    received = unpack(parts, pairs, come)
    for table, own_keys, scores in zip(given, received[::2], received[1::2], strict=True):
        made[table] = _among(table, own_keys, scores, keys(table))
    return made


def score_writes(
    table: EmbeddingTable, scored: KeyScores, words: torch.Tensor, now: int
) -> partial[Any]:
    """Return a function that writes the scores of the keys that have rows.

    Args:
        table: the table, after the lookup has found its keys.
        scored: the lookup's keys, and their scores.
        words: the table's scores.
        now: the table's clock.
    """
    rows = cast(HashTable, table.table).find(scored.keys)
    known = (rows >= 0).nonzero().squeeze(1)
    return partial(
        torch.Tensor.index_copy_, words, 0, rows[known], scored.scores[known] << 32 | now
    )


def _is_given(table: EmbeddingTable) -> bool:
    """Return whether calls pass scores with their keys."""
    return cast(UserScore, life_of(table).score).function is None


def _pairs(table: EmbeddingTable, requests: Sequence[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys in requests for a table, and their scores."""
    own = [request for request in requests if request.table is table]
    for request in own:
        if request.scores is None and len(request.bags.values):
            raise ValueError(
                f"{request.name}: with score='given' a lookup in training needs scores, one for "
                f"each key"
            )
    pairs = [request.scores for request in own if request.scores is not None]
    none = torch.empty(0, dtype=torch.int64, device=table.weight.device)
    each = zip(*pairs, (none, none), strict=True)
    keys, scores = map(torch.cat, each)
    return keys, scores


def _highest(keys: torch.Tensor, scores: torch.Tensor) -> KeyScores:
    """Return the distinct keys, and the highest score of each."""
    distinct, numbers, _ = ops.unique(keys)
    return KeyScores(
        distinct, torch.zeros_like(distinct).scatter_reduce_(0, numbers, scores, "amax")
    )


def _among(
    table: EmbeddingTable, keys: torch.Tensor, scores: torch.Tensor, asked: Asked
) -> KeyScores:
    """Return the distinct keys that a lookup inserts or finds, and the highest score of each."""
    scored = _highest(keys, scores)
    # Padding and keys beyond a bag's limit have scores, but are not looked up.
    among = torch.isin(scored.keys, _distinct(table, asked))
    return KeyScores(scored.keys[among], scored.scores[among])


def _distinct(table: EmbeddingTable, asked: Asked) -> torch.Tensor:
    """Return the distinct keys, except keys of fallback rows and keys that are only read."""
    keys, occurrences, *_ = asked  # keys that are only read have occurrence count 0
    distinct = ops.unique(keys if occurrences is None else keys[occurrences > 0])[0]
    return distinct if table.fallback is None else distinct[~table.fallback.has(distinct)]


@torch.no_grad()
def _returned(table: EmbeddingTable, asked: Asked) -> KeyScores:
    """Call a table's score function; without one, return the rows' current scores."""
    distinct = _distinct(table, asked)
    score = cast(UserScore, life_of(table).score)
    if score.function is None:
        rows = cast(HashTable, table.table).find(distinct)
        words = cast(torch.Tensor, table.scores)[rows.clamp(min=0)]
        return KeyScores(distinct, torch.where(rows < 0, 0, score.order(words, 0)))
    if not len(distinct):
        return KeyScores(distinct, distinct)
    try:
        scores: object = score.function(distinct.clone())
    except Exception as error:
        raise RuntimeError(
            f"{table.name}: score function {score.called} raised {type(error).__name__}: {error}"
        ) from error
    what = f"{table.name}: the result of score function {score.called} must be"
    return KeyScores(distinct, _check(what, scores, (distinct.shape,), distinct))


def _check(
    what: str, scores: object, shapes: Sequence[torch.Size], keys: torch.Tensor
) -> torch.Tensor:
    """Check scores of keys, int64 ``[n]``, and return them.

    Raises:
        TypeError, ValueError: the scores are not valid; the error begins with `what`.
    """
    if not isinstance(scores, torch.Tensor):
        raise TypeError(f"{what} a tensor, got {type(scores).__name__}")
    if scores.dtype != torch.int64:
        raise TypeError(f"{what} int64, got {scores.dtype}")
    if scores.shape not in shapes or scores.device != keys.device:
        listed = " or ".join(dict.fromkeys(str(tuple(shape)) for shape in shapes))
        raise ValueError(
            f"{what} of shape {listed} on {keys.device}, one for each key, got shape "
            f"{tuple(scores.shape)} on {scores.device}"
        )
    flat = scores.reshape(-1)
    outside = ((flat < 0) | (flat > MOST_SCORE)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"{what} in [0, 2^32), got {int(flat[at])} for key {int(keys[at])}")
    return scores
