"""An autoencoder that recommends items, with sparse inputs and outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist

from ... import ops
from ...errors import check_int
from ...nn import DistributedEmbedding, EmbeddingGroup
from ...optim import LazyAdam, split_embedding_variable_from_others
from .. import saved
from ..saved import SavedModel
from .rated_items import RatedItems


class Autoencoder(SavedModel):
    r"""A model that scores all items for a user from the items that the user has rated.

    .. math::
        h = \tanh(W_1 \tanh(\sum_{j \in N} w_j e_j / |w| + b_0) + b_1), \quad
        s_i = h \cdot v_i + c_i

    N is the set of items that the user has rated, and the :math:`w_j` are the ratings, scaled to
    [0.2, 1]. :math:`e_j` is the vector of an item as input; :math:`v_i` and :math:`c_i` are the
    vector and the bias of an item to be scored. Vectors are looked up by the items' ids, so each
    item takes memory on only one rank, and no ``[users, items]`` matrix is created.

    A user's loss is the cross entropy between a softmax over scores and the rated items,
    weighted by :math:`w`. It is masked: the softmax covers only the rated items and `negatives`
    random other items, which are drawn once per step for all users. Thus a missing rating is weak
    evidence: it only means that the user prefers other items. In training, random items in a user's
    bag are dropped; otherwise h could learn to copy its input. Random draws depend on the step and
    the entry, but not on the rank. Sources: Liang et al., "Variational autoencoders for
    collaborative filtering", WWW 2018, for Mult-DAE, and Jean et al., ACL 2015, for the sampled
    softmax.

    Args:
        history: all users' ratings, used as both input and target in training.
        dim: number of elements in h, e and v, >= 1.
        layers: number of dense layers (W, b), >= 0.
        dropout: fraction of a bag's items that are dropped in training, in [0, 1).
        negatives: number of items to draw in each step, >= 1; duplicates count once.
        seed: seed of the initial vectors and of all random draws.
        source: name of the data, saved with the model.

    Raises:
        TypeError, ValueError: an argument has the wrong type or is out of range.

    Shape:
        - rows: int64 ``[n]``, indices into ``history.users``. Losses: float32 ``[n]``.
    """

    FORMAT = "sparsekit autoencoder 1"

    _weights: torch.Tensor  # float32 [entries], w
    steps: torch.Tensor  # int64 []

    def __init__(
        self,
        history: RatedItems,
        *,
        dim: int = 64,
        layers: int = 1,
        dropout: float = 0.8,
        negatives: int = 512,
        seed: int = 0,
        source: str = "",
    ) -> None:
        super().__init__()
        check_int("Autoencoder", "dim", dim, 1, 2**20)
        check_int("Autoencoder", "layers", layers, 0, 1000)
        check_int("Autoencoder", "negatives", negatives, 1, 2**31 - 1)
        if not 0 <= dropout < 1:
            raise ValueError(f"Autoencoder: dropout must be in [0, 1), got {dropout}")
        self._settings: dict[str, Any] = {
            "dim": dim,
            "layers": layers,
            "dropout": dropout,
            "negatives": negatives,
            "seed": seed,
            "source": source,
        }
        self.source = source
        self.history = history
        self.dropout = dropout
        self.negatives = negatives
        # Number of draws so far, as a buffer, so that a resumed run does not repeat draws.
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("_weights", history.weights(), persistent=False)
        # Make the generator on the CPU, even if torch's default device is another one.
        generator = torch.Generator("cpu").manual_seed(seed)
        seeds = torch.randint(2**62, (3,), generator=generator, device="cpu").tolist()
        self._noise = seeds[0]
        capacity = _share(len(history.items))
        self.embeddings = EmbeddingGroup(
            {
                "rated": DistributedEmbedding(
                    "sqrtn", capacity, dim, 1, seed=seeds[1], name="rated"
                ),
                # The first element of a row is the bias, so one lookup returns bias and vector.
                "scored": DistributedEmbedding(
                    "sum", capacity, 1 + dim, 1, seed=seeds[2], name="scored"
                ),
            }
        )
        self.bias = torch.nn.Parameter(torch.zeros(dim))
        self.hidden = torch.nn.ModuleList([_linear(dim, generator) for _ in range(layers)])

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the codes (1, h) of this rank's users, ``[n, 1 + dim]`` (a collective call)."""
        entries, offsets, _ = self.history(rows)
        keys = self.history.items[self.history.columns[entries]]
        return self._look_up(keys, offsets, self._weights[entries], keys[:0])[0]

    def codes_of(self, pooled: torch.Tensor) -> torch.Tensor:
        """Compute users' codes (1, h) ``[n, 1 + dim]`` from their pooled bags ``[n, dim]``."""
        codes = torch.tanh(pooled + self.bias)
        for linear in self.hidden:
            codes = torch.tanh(linear(codes))
        return torch.nn.functional.pad(codes, (1, 0), value=1.0)

    def vectors(self, begin: int, end: int) -> torch.Tensor:
        """Return biases and vectors ``[m, 1 + dim]`` of items ``[begin, end)``.

        A collective call.
        """
        return self._table("scored").vectors(self.history.items[begin:end])

    def score(self, codes: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Compute the scores s ``[n, m]`` from the results of `encode` and `vectors`."""
        return codes @ vectors.T

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute the masked loss of each user, ``[n]``; each call makes new random draws.

        A collective: each rank passes its part of a batch, which may be empty.
        """
        history = self.history
        entries, offsets, row = history(rows)
        columns, weights = history.columns[entries], self._weights[entries]
        keys = history.items[columns]
        kept, others = self._draw(entries)
        ends = torch.nn.functional.pad(kept.cumsum(0), (1, 0))[offsets]
        codes, vectors = self._look_up(
            keys[kept], ends, weights[kept], torch.cat([keys, history.items[others]])
        )
        of_rated, of_others = vectors.split([len(keys), len(others)])
        rated = (codes[row] * of_rated).sum(1)  # [entries]
        unrated = self.score(codes, of_others)  # [n, others]
        # An item is drawn with probability `chance`, so a drawn item represents 1 / chance items.
        chance = 1 - (1 - 1 / len(history.items)) ** self.negatives
        unrated = unrated - math.log(chance)
        place = torch.searchsorted(others, columns).clamp(max=len(others) - 1)
        twice = others[place] == columns  # drawn items that the user has rated
        unrated = unrated.index_put((row[twice], place[twice]), unrated.new_tensor(-math.inf))
        mean = _sum(weights * rated, row, len(rows)) / _sum(weights, row, len(rows))
        return _logsumexp(rated, row, unrated) - mean

    def optimizers(self, lr: float = 5e-3) -> list[torch.optim.Optimizer]:
        """Return two optimizers: `LazyAdam` for the tables and Adam for the dense part."""
        sparse, dense = split_embedding_variable_from_others(self)
        return [LazyAdam(sparse, lr=lr), torch.optim.Adam(dense, lr=lr)]

    def content(self) -> dict[str, Any]:
        """Return the model's arguments, weights and history, for `save`."""
        return {
            "settings": self._settings,
            "steps": int(self.steps),
            "history": self.history.state_dict(),
            "tables": {name: saved.all_items(self._table(name)) for name in ("rated", "scored")},
            "dense": {"bias": self.bias.detach(), "hidden": self.hidden.state_dict()},
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Autoencoder:
        """Rebuild a model from the result of `content`."""
        model = cls(RatedItems.restored(state["history"]), **state["settings"])
        model.steps.fill_(state["steps"])
        with torch.no_grad():
            model.bias.copy_(state["dense"]["bias"])
        model.hidden.load_state_dict(state["dense"]["hidden"])
        for name, (keys, vectors) in state["tables"].items():
            model._table(name).assign(keys, vectors)
        return model

    def _table(self, name: str) -> DistributedEmbedding:
        return cast("DistributedEmbedding", self.embeddings.layers[name])

    def _look_up(
        self, keys: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor, scored: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up the codes (1, h) of bags, and the biases and vectors of items to be scored."""
        one_each = torch.arange(len(scored) + 1, device=scored.device)
        bags = {"rated": (keys, offsets), "scored": (scored, one_each)}
        found = self.embeddings(bags, {"rated": weights})
        return self.codes_of(found["rated"][:, 0]), found["scored"][:, 0]

    def _draw(self, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw a bool mask of the entries to keep in bags, and the sorted columns of negatives."""
        # Use hashes instead of a generator. Hashes are the same on all ranks, however a batch is
        # split among them.
        seed = (self._noise + 2 * int(self.steps)) % 2**63
        self.steps += 1
        kept = ops.hash_integers(entries, seed) >= int((self.dropout - 0.5) * 2**64)
        draws = torch.arange(self.negatives, device=entries.device)
        drawn = ops.hash_integers(draws, seed + 1).remainder(len(self.history.items))
        return kept, drawn.unique()


def _share(items: int) -> int:
    """Return the table capacity that each rank needs for its part of the items.

    Items are assigned to ranks by a hash. The result is six standard deviations above the mean, so
    the probability that a rank gets more items is about 10^-9.
    """
    mean = items / (dist.get_world_size() if dist.is_initialized() else 1)
    return min(items, math.ceil(mean + 6 * math.sqrt(mean)))


def _linear(dim: int, generator: torch.Generator) -> torch.nn.Linear:
    linear = torch.nn.Linear(dim, dim)
    with torch.no_grad():
        start = torch.randn(dim, dim, generator=generator, device="cpu")
        linear.weight.copy_(start / math.sqrt(dim))
        linear.bias.zero_()
    return linear


def _sum(values: torch.Tensor, row: torch.Tensor, rows: int) -> torch.Tensor:
    return values.new_zeros(rows).index_add(0, row, values)


def _logsumexp(ragged: torch.Tensor, row: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """Return each row's logsumexp over its elements in block ``[n, m]`` and in ragged ``[e]``."""
    top = block.detach().amax(1).scatter_reduce(0, row, ragged.detach(), "amax")
    total = (block - top[:, None]).exp().sum(1)
    return total.index_add(0, row, (ragged - top[row]).exp()).log() + top
