"""Initializers: distributions of the initial values of embedding vectors."""

from dataclasses import dataclass
from functools import cached_property

import torch

from ..ops.init_rows import DISTRIBUTIONS

# The op makes the same checks as its wrapper in sparsekit.ops, which is slower but explains errors.
_init_rows = torch.ops.sparsekit.init_rows_.default


@dataclass(frozen=True)
class Initializer:
    """A distribution of initial values; use one of its subclasses."""

    @property
    def _distribution(self) -> tuple[str, float, float]:
        raise NotImplementedError

    @cached_property
    def numbers(self) -> tuple[float, float, float]:
        """The distribution in the form that ops require: number in `DISTRIBUTIONS`, a and b."""
        name, a, b = self._distribution
        return DISTRIBUTIONS[name], a, b

    def __post_init__(self) -> None:
        name, a, b = self._distribution
        # Check a, b and b - a in float32: values are drawn in float32, and a uniform draw is scaled
        # by b - a.
        if not all(abs(x) <= torch.finfo(torch.float32).max for x in (a, b, b - a)):
            raise ValueError(f"{self}: the parameters must be finite in float32")
        if name == "uniform" and a >= b:
            raise ValueError(f"{self}: low must be below high")
        if name == "normal" and b < 0:
            raise ValueError(f"{self}: std must not be negative")

    def write_(
        self,
        out: torch.Tensor,
        keys: torch.Tensor,
        rows: torch.Tensor | None = None,
        status: torch.Tensor | None = None,
        *,
        seed: int,
    ) -> None:
        """Write the initial vectors of keys to ``out[rows]``; see `sparsekit.ops.init_rows_`.

        The seed is a signed 64-bit integer, like a layer's seed.
        """
        _init_rows(out, keys, rows, status, seed, *self.numbers)

    def fill_(self, weight: torch.Tensor, rank: int, world_size: int, *, seed: int) -> None:
        """Write the initial vectors of a rank's rows, where key k is row ``k // world_size``."""
        keys = torch.arange(len(weight), device=weight.device) * world_size + rank
        self.write_(weight.data, keys, seed=seed)


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform distribution in [low, high), drawn in float32.

    A bfloat16 layer rounds the draws to nearest, so a value may be equal to high.
    """

    low: float = -0.05
    high: float = 0.05

    @property
    def _distribution(self) -> tuple[str, float, float]:
        return "uniform", self.low, self.high


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal distribution with the given mean and standard deviation."""

    mean: float = 0.0
    std: float = 0.05

    @property
    def _distribution(self) -> tuple[str, float, float]:
        return "normal", self.mean, self.std


@dataclass(frozen=True)
class Constant(Initializer):
    """The same value for all elements."""

    value: float = 0.0

    @property
    def _distribution(self) -> tuple[str, float, float]:
        return "constant", self.value, 0.0
