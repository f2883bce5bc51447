"""DeepCoNN: predicts ratings from the reviews by a user and the reviews of an item."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...distributed import exchange_of
from ...distributed.swap import swap
from ...errors import check_choice, check_int
from ...nn import Embedding, Uniform
from ...optim import Adam

PLACEMENTS = ("single", "split", "alternating")
TOWERS = ("user", "item")
WIDTH, POOL = 3, 2  # widths of filters and of pooling windows, in words


class DeepCoNN(torch.nn.Module):
    r"""A model with two text towers; a rating is the dot product of the towers' vectors.

    Source: Zheng, Noroozi and Yu, "Joint Deep Modeling of Users and Items Using Reviews for
    Recommendation", WSDM 2017. A tower maps words ``[n, length]`` to ``[n, hidden]``: it looks up
    the words' vectors, applies a convolution over 3 words and tanh, takes the maximum of every two
    neighbors, and applies a dense layer with ReLU. Both towers use the same table of words. Word 0
    is padding: its vector is always zero.

    Args:
        words: number of words, including padding; see `sparsekit.datasets.reviews.Vocabulary`.
        length: number of words in a document, at least 4.
        dim: number of elements in a word's vector.
        filters: number of filters in the convolution.
        hidden: number of elements in a document's vector.
        placement: how the layers are distributed over ranks.

            - ``"single"``: each rank has all layers. With several ranks, each has a part of the
              batch and of the table, as in other models.
            - ``"split"``: each of two ranks has one tower. The ranks share the table of words and
              exchange the vectors of documents.
            - ``"alternating"``: every second layer of each tower is on the other of two ranks.

        seed: seed of the initial weights, which are the same for any placement.

    Raises:
        TypeError, ValueError: an argument is invalid; or placement is split or alternating, but
            the number of ranks is not 2.

    Example:
        >>> model = DeepCoNN(words=100, length=8)
        >>> documents = torch.randint(1, 100, (4, 8))
        >>> model(documents, documents).shape
        torch.Size([4])
    """

    def __init__(
        self,
        words: int,
        length: int = 800,
        *,
        dim: int = 50,
        filters: int = 10,
        hidden: int = 64,
        placement: str = "single",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("DeepCoNN", "placement", placement, PLACEMENTS)
        check_int("DeepCoNN", "words", words, 2, 2**31 - 1)
        self.length = check_int("DeepCoNN", "length", length, WIDTH + POOL - 1, 2**31 - 1)
        self.placement = placement
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        if placement != "single" and ranks != 2:
            raise ValueError(f"DeepCoNN: placement {placement!r} needs 2 ranks, there are {ranks}")
        self.words = Embedding(
            -(-words // ranks),
            dim,
            padding_idx=0,
            use_hashtable=False,
            embedding_initializer=Uniform(-0.5, 0.5),
            # With placement single, each rank computes the mean loss over its part of the batch.
            gradient_reduction="mean" if placement == "single" else "sum",
            seed=seed,
            name="words",
        )
        self.flat = filters * (length - WIDTH + 1 - POOL + 1)
        # Draw the weights of all layers on every rank, so that they do not depend on the placement.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            convolutions = {tower: torch.nn.Conv1d(dim, filters, WIDTH) for tower in TOWERS}
            dense = {tower: torch.nn.Linear(self.flat, hidden) for tower in TOWERS}
        if placement != "single":
            of_convolution = rank if placement == "split" else 1 - rank
            convolutions = {TOWERS[of_convolution]: convolutions[TOWERS[of_convolution]]}
            dense = {TOWERS[rank]: dense[TOWERS[rank]]}
        self.convolutions = torch.nn.ModuleDict(convolutions)
        self.dense = torch.nn.ModuleDict(dense)
        self._rank = rank

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predict ratings, float32 ``[n]``, from two batches of documents, int64 ``[n, length]``.

        Unless the placement is single, both ranks must pass the same documents, and both get the
        result.

        Raises:
            ValueError: documents have the wrong shape.
            RuntimeError: the ranks' batches differ in size.
        """
        for name, documents in zip(TOWERS, (users, items), strict=True):
            if documents.shape != (len(users), self.length):
                raise ValueError(
                    f"DeepCoNN: documents of {name}s must be [{len(users)}, {self.length}], got "
                    f"{list(documents.shape)}"
                )
        if self.placement == "single":
            # Use one lookup for both towers, so that a word in both is looked up only once.
            of_users, of_items = self.words(torch.stack([users, items])).unbind()
            user = self._dense("user", self._features("user", of_users))
            item = self._dense("item", self._features("item", of_items))
            return (user * item).sum(1)
        own, other = TOWERS[self._rank], TOWERS[1 - self._rank]
        vectors = self.words(items if self._rank else users)
        if self.placement == "split":
            features = self._features(own, vectors)
        else:
            features = self._features(other, self._swap(vectors, "words"))
            features = self._swap(features, "features")
        document = self._dense(own, features)
        # Both ranks compute the same loss. Each one computes the gradients of its own documents'
        # vectors, so no gradients are sent.
        return (document * self._swap(document.detach(), "documents")).sum(1)

    def losses(
        self, users: torch.Tensor, items: torch.Tensor, ratings: torch.Tensor
    ) -> torch.Tensor:
        """Return the squared errors ``[n]`` of predictions, given the true ratings ``[n]``."""
        return (self(users, items) - ratings).square()

    def optimizer(self, lr: float = 1e-4) -> torch.optim.Optimizer:
        """Return an Adam optimizer for the weights on this rank."""
        return Adam(self.parameters(), lr=lr)

    def _features(self, tower: str, vectors: torch.Tensor) -> torch.Tensor:
        """Map vectors ``[n, length, dim]`` to features ``[n, flat]``."""
        found = self.convolutions[tower](vectors.transpose(1, 2)).tanh()
        return torch.nn.functional.max_pool1d(found, POOL, stride=1).flatten(1)

    def _dense(self, tower: str, features: torch.Tensor) -> torch.Tensor:
        return self.dense[tower](features).relu()

    def _swap(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        exchange = exchange_of(None, tensor.device, "towers")
        if exchange is None:
            raise RuntimeError("DeepCoNN: the process group that it was made for is gone")
        return swap(exchange, tensor, f"DeepCoNN's {what}")
