"""A model that predicts ratings from the raw ids of users and items."""

from __future__ import annotations

import os
from typing import Any, cast

import torch

from ...datasets import Ratings
from ...nn import DistributedEmbedding, EmbeddingGroup, Uniform
from ...tables.hash_table import HashTable
from .. import saved
from ..rows import rows_of_table
from ..saved import SavedModel

# Small initial biases and vectors, so that the first predictions are close to the mean.
INITIAL = Uniform(-0.05, 0.05)
# Penalties, chosen using the latest fifth of each user's training ratings in MovieLens-100K.
L2_VECTORS = 0.15
L2_RATED = 0.4
L2_BIASES = 0.01


class UserHistory(torch.nn.Module):
    """The latest items that each user has rated, as bags for an embedding layer.

    Args:
        train: the known ratings; must not contain ratings to be predicted.
        max_items: maximum number of items in a bag.
    """

    users: torch.Tensor  # int64 [u], sorted, distinct
    starts: torch.Tensor  # int64 [u + 1]: user i has items[starts[i] : starts[i + 1]]
    items: torch.Tensor  # int64 [n], ordered by user, then by time

    def __init__(self, train: Ratings, max_items: int = 32) -> None:
        super().__init__()
        self.max_items = max_items
        order, users, counts, from_end = train.by_user()
        starts = torch.nn.functional.pad(counts.clamp(max=max_items).cumsum(0), (1, 0))
        self.register_buffer("users", users)
        self.register_buffer("starts", starts)
        self.register_buffer("items", train.items[order][from_end <= max_items])

    def forward(
        self, users: torch.Tensor, without: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the bag of items of each user, without one of them.

        Args:
            users: ids of users, int64 ``[n]``. An unknown user has an empty bag.
            without: for each bag, the item whose rating is to be predicted, int64 ``[n]``. In
                training, this item is in the history, which would reveal that the user has rated
                it.

        Returns:
            ``(values, offsets [n + 1])``, both int64.
        """
        at = torch.searchsorted(self.users, users).clamp(max=len(self.users) - 1)
        counts = torch.where(self.users[at] == users, self.starts[at + 1] - self.starts[at], 0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        bag = torch.repeat_interleave(torch.arange(len(users), device=users.device), counts)
        place = torch.arange(len(bag), device=users.device) - offsets[bag]
        values = self.items[self.starts[at][bag] + place]
        keep = values != without[bag]
        return values[keep], torch.nn.functional.pad(keep.cumsum(0), (1, 0))[offsets]


class RatingModel(SavedModel):
    r"""SVD++: matrix factorization with biases and the user's history.

    .. math::
        r_{ui} = \mu + b_u + b_i + q_i \cdot (p_u + W |N|^{-1/2} \sum_{j \in N} y_j)

    N is the history of u without i. The dense part consists of mu and W. Source: Koren,
    "Factorization meets the neighborhood", KDD 2008, where W is the identity.

    The keys of the hash tables are the raw ids, which need not be counted or renumbered first.

    Args:
        train: training ratings, which determine the history, the mean and the range of ratings.
        dim: number of elements of p, q and y.
        capacity: number of rows of each table on each rank. With None, tables grow on the
            CPU, and have 100,000 rows on CUDA.
        history_size: maximum number of items in a history.
        seed: seed of the initial vectors.
        options: other options of each table, as for `DistributedEmbedding`, such as
            ``on_full="evict"``. `save` leaves them out.
    """

    FORMAT = "sparsekit ratings 1"

    def __init__(
        self,
        train: Ratings,
        *,
        dim: int = 32,
        capacity: int | None = None,
        history_size: int = 32,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self._settings = {
            "dim": dim,
            "capacity": capacity,
            "history_size": history_size,
            "seed": seed,
        }
        # Make the generator on the CPU, even if torch's default device is a different one.
        generator = torch.Generator("cpu").manual_seed(seed)
        seeds = torch.randint(2**62, (3,), generator=generator, device="cpu").tolist()

        def layer(name: str, seed: int, dim: int, max_nnz: int = 1) -> DistributedEmbedding:
            return DistributedEmbedding(
                "sqrtn",
                rows_of_table(capacity, options),
                dim,
                1,
                max_nnz,
                embedding_initializer=INITIAL,
                seed=seed,
                name=name,
                **options,
            )

        # The first element of a user's or item's row is the bias, so that one lookup returns both
        # bias and vector.
        layers = [
            layer("user", seeds[0], 1 + dim),
            layer("item", seeds[1], 1 + dim),
            layer("rated", seeds[2], dim, history_size),
        ]
        self.embeddings = EmbeddingGroup({layer.name: layer for layer in layers})
        self.history = UserHistory(train, history_size)
        self.project = torch.nn.Linear(dim, dim, bias=False)
        torch.nn.init.eye_(self.project.weight)
        self.mean = torch.nn.Parameter(train.ratings.double().mean().float())
        self.low, self.high = (bound.item() for bound in train.ratings.aminmax())

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predict ratings ``[n]`` for pairs of ids, clamped to the range of training ratings."""
        return self._score(users, items)[0].clamp(self.low, self.high)

    def losses(
        self, users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the squared errors and penalties to be minimized in training.

        Returns:
            ``(squared errors [n], penalties [n])``. A sample's penalty is the sum of the squared
            vectors (times L2_VECTORS) and biases (times L2_BIASES) of its user and item, and of the
            user's squared pooled history (times L2_RATED). Vectors used more are penalized more.
        """
        scores, penalty = self._score(users, items)
        return (scores - ratings).square(), penalty

    def table_sizes(self) -> dict[str, int]:
        """Return the number of rows in use on this rank in each table, by name."""
        tables = {name: layer.table for name, layer in self.embeddings.layers.items()}
        return {name: len(table) for name, table in tables.items() if isinstance(table, HashTable)}

    def content(self) -> dict[str, Any]:
        """Return the model's arguments and weights, without the training ratings, for `save`."""
        tables = {name: saved.all_items(self._layer(name)) for name in self.embeddings.layers}
        return {
            "settings": self._settings,
            "range": (self.low, self.high),
            "tables": tables,
            "project": self.project.state_dict(),
            "mean": self.mean.detach(),
            "history": self.history.state_dict(),
        }

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, capacity: int | None = None) -> RatingModel:
        """Load a model written by `save` onto the CPU (a collective call).

        Args:
            path: path of the file.
            capacity: number of rows of each table on each rank; None means the saved model's
                capacity, or more if the saved rows of all ranks exceed that.

        Raises:
            ValueError: the file does not contain such a model.
            OSError: the file cannot be read.
            TableFullError: the saved rows exceed the capacity.
        """
        state = saved.read(path, cls.FORMAT)
        most = max(len(keys) for keys, _ in state["tables"].values())
        settings = state["settings"]
        if capacity is not None or settings["capacity"] is not None:
            settings["capacity"] = capacity or max(settings["capacity"], most)
        anything = torch.zeros(1)
        model = cls(Ratings(anything.long(), anything.long(), anything, anything), **settings)
        model.low, model.high = state["range"]
        with torch.no_grad():
            model.mean.copy_(state["mean"])
        model.project.load_state_dict(state["project"])
        for name, buffer in state["history"].items():
            setattr(model.history, name, buffer)
        for name, (keys, vectors) in state["tables"].items():
            model._layer(name).assign(keys, vectors)
        return model

    def _layer(self, name: str) -> DistributedEmbedding:
        return cast("DistributedEmbedding", self.embeddings.layers[name])

    def _score(self, users: torch.Tensor, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one_each = torch.arange(len(users) + 1, device=users.device)
        bags = {
            "user": (users, one_each),
            "item": (items, one_each),
            "rated": self.history(users, without=items),
        }
        found = {name: vectors[:, 0] for name, vectors in self.embeddings(bags).items()}
        user, item = found["user"], found["item"]  # [n, 1 + dim]
        rated = self.project(found["rated"])  # [n, dim]
        product = item[:, 1:] * (user[:, 1:] + rated)
        scores = self.mean + user[:, 0] + item[:, 0] + product.sum(1)
        vectors = (user[:, 1:].square() + item[:, 1:].square()).sum(1)
        biases = user[:, 0].square() + item[:, 0].square()
        penalty = L2_VECTORS * vectors + L2_RATED * rated.square().sum(1) + L2_BIASES * biases
        return scores, penalty
