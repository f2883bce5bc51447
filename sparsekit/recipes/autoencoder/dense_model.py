"""The autoencoder of tfautorec: a dense row of ratings for each user."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping
from typing import Any

import torch

from ...optim import RMSProp
from .. import saved
from .rated_items import RatedItems

# Units between the items and the items again.
HIDDEN = (10, 5, 10)
# Mark of the file format of a saved model.
FORMAT = "sparsekit dense autoencoder 1"


class DenseAutoencoder(torch.nn.Module):
    """An autoencoder n-10-5-10-n on rows of the dense matrix of users and items.

    Sigmoids everywhere, weights and biases from N(0, 1), and the squared error over all cells,
    rated or not, of ratings scaled to [0, 1]. So the lowest rating is the same as none, and the
    weights of all items are on every rank: `Autoencoder` does better in both. This one is here to
    compare with. Source: https://github.com/vitobellini/tfautorec.

    Args:
        history: what users have rated, which is also what is trained on.
        seed: of the initial weights.
        source: what the data is called, for those who load the model.

    Shape:
        - rows: int64 ``[n]``, places in ``history.users``. Output: float32 ``[n, items]``.
    """

    _cells: torch.Tensor  # float32 [entries], scaled ratings

    def __init__(self, history: RatedItems, *, seed: int = 0, source: str = "") -> None:
        super().__init__()
        self.source = source
        self.history = history
        self.register_buffer("_cells", history.scaled(), persistent=False)
        count = len(history.items)
        sizes = [count, *HIDDEN, count]
        # On the CPU, where the generator is, whatever torch's default device.
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(*shape: int) -> torch.nn.Parameter:
            # float64 and [in, out], all weights before all biases, as in the original.
            start = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
            return torch.nn.Parameter(start.to(history.ratings))

        self.weights = torch.nn.ParameterList([draw(*pair) for pair in itertools.pairwise(sizes)])
        self.biases = torch.nn.ParameterList([draw(size) for size in sizes[1:]])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Predict the scaled ratings of all items."""
        return self.score(self.encode(rows), self.vectors(0, len(self.history.items)))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Compute 1 and the last hidden layer of users, ``[n, 11]``."""
        return self._encode(self._matrix(rows))

    def vectors(self, begin: int, end: int) -> torch.Tensor:
        """Bias and weights of the items from begin to end, ``[m, 11]``."""
        bias, weight = self.biases[-1], self.weights[-1]
        return torch.cat([bias[None, begin:end], weight[:, begin:end]]).T

    def score(self, codes: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Scaled ratings ``[n, m]`` of codes, from `encode`, and vectors, from `vectors`."""
        return torch.sigmoid(codes @ vectors.T)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """The mean squared error of each user over all cells, ``[n]``."""
        matrix = self._matrix(rows)
        found = self.score(self._encode(matrix), self.vectors(0, len(self.history.items)))
        return torch.nn.functional.mse_loss(found, matrix, reduction="none").mean(1)

    def optimizers(self, lr: float = 0.03) -> list[torch.optim.Optimizer]:
        """TensorFlow's RMSProp: decay 0.9, an accumulator from 1, eps 1e-10 inside the root."""
        return [RMSProp(self.parameters(), lr=lr, form="tensorflow")]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model and its history to one file; on several ranks rank 0 does.

        Raises:
            OSError: on rank 0, the file cannot be written. One that was there stays as it was.
        """
        state = {"format": FORMAT, "source": self.source, "model": self.state_dict()}
        saved.write(path, state)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> DenseAutoencoder:
        """Read what `save` has written, on the CPU.

        Raises:
            ValueError: the file is something else.
            OSError: it cannot be read.
        """
        return cls.restored(saved.read(path, FORMAT))

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DenseAutoencoder:
        """The model of a file's content."""
        of_history = {
            name.removeprefix("history."): value
            for name, value in state["model"].items()
            if name.startswith("history.")
        }
        model = cls(RatedItems.restored(of_history), source=state["source"])
        model.load_state_dict(state["model"])
        return model

    def _encode(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight, bias in zip(self.weights[:-1], self.biases[:-1], strict=True):
            hidden = torch.sigmoid(torch.addmm(bias, hidden, weight))
        return torch.nn.functional.pad(hidden, (1, 0), value=1.0)

    def _matrix(self, rows: torch.Tensor) -> torch.Tensor:
        """Scaled ratings ``[n, items]``, 0 where there is none."""
        entries, _, row = self.history(rows)
        matrix = self._cells.new_zeros(len(rows), len(self.history.items))
        matrix[row, self.history.columns[entries]] = self._cells[entries]
        return matrix
