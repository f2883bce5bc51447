"""The autoencoder of tfautorec, whose input is a dense row of ratings for each user."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from ...optim import RMSProp
from ..saved import SavedModel
from .rated_items import RatedItems

# Sizes of the hidden layers; input and output have one unit per item.
HIDDEN = (10, 5, 10)


class DenseAutoencoder(SavedModel):
    """An autoencoder with layer sizes n-10-5-10-n, on rows of the dense users-by-items matrix.

    All activations are sigmoids. Weights and biases are drawn from N(0, 1). The loss is the mean
    squared error over all cells, rated or not, of ratings scaled to [0, 1]. This has two
    disadvantages: the lowest rating looks like a missing one, and every rank stores the weights of
    all items. `Autoencoder` avoids both; this model is for comparison. Source:
    https://github.com/vitobellini/tfautorec.

    Args:
        history: all users' ratings, used as both input and target in training.
        seed: seed of the initial weights.
        source: name of the data, saved with the model.

    Shape:
        - rows: int64 ``[n]``, indices into ``history.users``. Output: float32 ``[n, items]``.
    """

    FORMAT = "sparsekit dense autoencoder 1"
    _cells: torch.Tensor  # float32 [entries], scaled ratings

    def __init__(self, history: RatedItems, *, seed: int = 0, source: str = "") -> None:
        super().__init__()
        self.source = source
        self.history = history
        self.register_buffer("_cells", history.scaled(), persistent=False)
        count = len(history.items)
        sizes = [count, *HIDDEN, count]
        # Make the generator on the CPU, even if torch's default device is another one.
        generator = torch.Generator("cpu").manual_seed(seed)

        def draw(*shape: int) -> torch.nn.Parameter:
            # As in the original: draw float64 in shape [in, out], all weights before all biases.
            start = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
            return torch.nn.Parameter(start.to(history.ratings))

        self.weights = torch.nn.ParameterList([draw(*pair) for pair in itertools.pairwise(sizes)])
        self.biases = torch.nn.ParameterList([draw(size) for size in sizes[1:]])

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Predict the scaled ratings of all items."""
        return self.score(self.encode(rows), self.vectors(0, len(self.history.items)))

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Return a 1 followed by the last hidden layer's values for each user, ``[n, 11]``."""
        return self._encode(self._matrix(rows))

    def vectors(self, begin: int, end: int) -> torch.Tensor:
        """Return the biases and output weights of items ``[begin, end)``, ``[m, 11]``."""
        bias, weight = self.biases[-1], self.weights[-1]
        return torch.cat([bias[None, begin:end], weight[:, begin:end]]).T

    def score(self, codes: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Predict scaled ratings ``[n, m]`` from the results of `encode` and `vectors`."""
        return torch.sigmoid(codes @ vectors.T)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of each user over all cells, ``[n]``."""
        matrix = self._matrix(rows)
        found = self.score(self._encode(matrix), self.vectors(0, len(self.history.items)))
        return torch.nn.functional.mse_loss(found, matrix, reduction="none").mean(1)

    def optimizers(self, lr: float = 0.03) -> list[torch.optim.Optimizer]:
        """Return an optimizer with the formula and defaults of TensorFlow's RMSProp."""
        return [RMSProp(self.parameters(), lr=lr, form="tensorflow")]

    def content(self) -> dict[str, Any]:
        """Return the weights, the history and the name of the data, for `save`."""
        return {"source": self.source, "model": self.state_dict()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DenseAutoencoder:
        """Rebuild a model from the result of `content`."""
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
        """Return the scaled ratings ``[n, items]``: 0 if a user has not rated an item."""
        entries, _, row = self.history(rows)
        matrix = self._cells.new_zeros(len(rows), len(self.history.items))
        matrix[row, self.history.columns[entries]] = self._cells[entries]
        return matrix
