"""A wide network: its input is a huge sparse matrix of hashed features."""

from __future__ import annotations

import math
import os
from collections import ChainMap
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ...errors import check_choice, check_int
from ...hashing import SplitHashEncoder
from ...hashing.split_hash import check_same_features
from ...nn import DistributedEmbedding
from ...optim import Adam, Ftrl
from .. import saved
from ..buckets import QuantileBuckets
from ..saved import SavedModel

LOSSES = ("bce", "mse")
OPTIMIZERS = ("adam", "ftrl")


class WideModel(SavedModel):
    r"""Two linear layers, of widths ``int(width ** 0.3)`` and 1, on hashed categories.

    The input is a sparse matrix ``[n, width]``. The first layer is a `DistributedEmbedding`: the
    columns of a row's nonzero entries are the keys of a bag, and the entries are their weights.
    Thus no dense ``[n, width]`` matrix is created. With several ranks, column c is on rank
    ``c % world_size``.

    Args:
        encoder: maps each feature's values to columns of the matrix.
        buckets: buckets of the numeric features. The index of a value's bucket is hashed instead
            of the value. With None, all features are hashed as categories.
        loss: ``"bce"``, the binary cross entropy of the score's sigmoid, or ``"mse"``, the squared
            error of the score itself.
        seed: seed of the initial weights.

    Raises:
        ValueError: ``loss`` is unknown, or ``buckets`` has features that ``encoder`` lacks.

    Example:
        >>> model = WideModel(SplitHashEncoder({"city": 1000, "day": 7}))
        >>> model(model.encode({"city": ["Bern", "Oslo"], "day": [3, None]})).shape
        torch.Size([2])
    """

    FORMAT = "sparsekit wide 1"

    def __init__(
        self,
        encoder: SplitHashEncoder,
        buckets: QuantileBuckets | None = None,
        *,
        loss: str = "bce",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_choice("WideModel", "loss", loss, LOSSES)
        self.encoder = encoder
        self.buckets = buckets or QuantileBuckets({})
        if strangers := [name for name in self.buckets.edges if name not in encoder.buckets]:
            raise ValueError(f"WideModel: buckets has {strangers}, which encoder lacks")
        self.loss = loss
        self.dim = int(encoder.width**0.3)
        # Make the generator on the CPU, even if torch's default device is another.
        generator = torch.Generator("cpu").manual_seed(seed)
        of_embedding = torch.randint(2**62, (1,), generator=generator, device="cpu").item()
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.embedding = DistributedEmbedding(
            "sum",
            -(-encoder.width // ranks),
            self.dim,
            1,
            use_hashtable=False,
            seed=int(of_embedding),
            name="wide",
        )
        self.head = torch.nn.Linear(self.dim, 1)
        start = torch.rand(self.dim, generator=generator, device="cpu").mul_(2).sub_(1)
        with torch.no_grad():
            self.head.weight.copy_(start[None] / math.sqrt(self.dim))
            self.head.bias.zero_()

    def encode(self, columns: Any) -> torch.Tensor:
        """Encode rows of raw values as a torch CSR matrix, float32 ``[n, width]``.

        Args:
            columns: n values of each feature, by name, as for `SplitHashEncoder.encode` or, for a
                numeric feature, as for `QuantileBuckets`.
        """
        return self.encoder.encode(ChainMap(self.buckets(columns), columns))

    def forward(self, matrix: Any) -> torch.Tensor:
        """Compute scores, float32 ``[n]``, from a torch or scipy CSR matrix ``[n, width]``."""
        return self.head(self.embedding(matrix)[:, 0])[:, 0]

    def losses(self, matrix: Any, labels: torch.Tensor) -> torch.Tensor:
        """Compute the loss of each sample, float32 ``[n]``; labels ``[n]`` are floats, 0 or 1."""
        scores = self(matrix)
        if self.loss == "mse":
            return (scores - labels).square()
        return torch.nn.functional.binary_cross_entropy_with_logits(
            scores, labels, reduction="none"
        )

    def probabilities(self, matrix: Any) -> torch.Tensor:
        """Return the probabilities of label 1, float32 ``[n]``; for mse, the clamped scores."""
        scores = self(matrix)
        return scores.clamp(0, 1) if self.loss == "mse" else scores.sigmoid()

    def optimizer(self, name: str = "adam", batch_size: int = 1) -> torch.optim.Optimizer:
        """Make the optimizer: `Adam` with lr 0.002, or `Ftrl` with lr 0.2 and l1 = l2 = 1.0.

        The values of l1, l2 and Ftrl's initial accumulator, 0.1, suit a loss summed over a batch.
        Here the loss is the mean over a batch, so l1 and l2 are divided by batch_size, and the
        accumulator by its square, which gives the same weights as with the sum.

        Only the table has penalties. If the head also had them, small batches could set all weights
        of the table and the head to zero in the first steps. All gradients would then be zero, too,
        and the model would stop learning.

        Args:
            name: ``"adam"`` or ``"ftrl"``.
            batch_size: total number of samples in a step, on all ranks.

        Raises:
            TypeError, ValueError: name is unknown, or batch_size is not an integer >= 1.
        """
        check_choice("WideModel", "name", name, OPTIMIZERS)
        n = check_int("WideModel", "batch_size", batch_size, 1, 2**31 - 1)
        if name == "adam":
            return Adam(self.parameters(), lr=0.002)
        groups = [
            {"params": [self.embedding.weight], "l1": 1 / n, "l2": 1 / n},
            {"params": list(self.head.parameters())},
        ]
        return Ftrl(groups, lr=0.2, initial_accumulator_value=0.1 / n**2)

    def weights(self) -> torch.Tensor:
        """Return the weights of the first layer for all columns, ``[width, dim]``.

        A collective call.
        """
        columns = torch.arange(self.encoder.width, device=self.head.weight.device)
        return self.embedding.vectors(columns)

    def content(self) -> dict[str, Any]:
        """Return the model's arguments, weights and encoder, for `save`."""
        encoder = self.encoder
        return {
            "lengths": encoder.feature_lengths,
            "encoder": {
                "splits": encoder.splits,
                "salts": encoder.salts,
                "signed": encoder.signed,
            },
            "edges": {name: cuts.tolist() for name, cuts in self.buckets.edges.items()},
            "loss": self.loss,
            "table": saved.all_items(self.embedding),
            "head": self.head.state_dict(),
        }

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], feature_lengths: Mapping[str, int] | None = None
    ) -> WideModel:
        """Load a model written by `save` onto the CPU (a collective call).

        Args:
            path: path of the file.
            feature_lengths: lengths that the saved model must have; None accepts any lengths. With
                other lengths, the weights would belong to other columns.

        Raises:
            ValueError: the file does not contain such a model, or its features differ from
                feature_lengths in name, order or length.
            OSError: the file cannot be read.
        """
        state = saved.read(path, cls.FORMAT)
        if feature_lengths is not None:
            check_same_features(os.fspath(path), state["lengths"], dict(feature_lengths))
        encoder = SplitHashEncoder(state["lengths"], **state["encoder"])
        model = cls(encoder, QuantileBuckets(state["edges"]), loss=state["loss"])
        keys, vectors = state["table"]
        # Drop extra rows: the ranks' tables have equal sizes, which may add up to over `width`.
        columns = keys < encoder.width
        model.embedding.assign(keys[columns], vectors[columns])
        model.head.load_state_dict(state["head"])
        return model


def select_rows(matrix: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Select rows of a torch CSR matrix by indices, int64 ``[k]``, which may repeat.

    torch has no function that selects CSR rows and returns a sparse result.
    """
    starts, columns, entries = matrix.crow_indices(), matrix.col_indices(), matrix.values()
    counts = (starts[1:] - starts[:-1])[rows]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    place = torch.arange(int(offsets[-1]), device=columns.device)
    place += torch.repeat_interleave(starts[:-1][rows] - offsets[:-1], counts)
    shape = len(rows), matrix.shape[1]
    return torch.sparse_csr_tensor(
        offsets, columns[place], entries[place], shape, check_invariants=False
    )
