"""Base class of the drop-ins: maps torch's arguments to TableOptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..errors import check_number
from ..lookup.access import assign_own
from ..tables.initializers import Normal
from ..tables.options import TableKeywords, TableOptions, check_count
from .layer import EmbeddingLayer

if TYPE_CHECKING:
    from typing_extensions import Unpack

_Layer = TypeVar("_Layer", bound="DropIn")


class DropIn(EmbeddingLayer):
    """Base of `Embedding` and `EmbeddingBag`: makes a table from torch's arguments and options."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        use_hashtable: bool,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
        **options: Unpack[TableKeywords],
    ) -> None:
        called = options.get("name") or type(self).__name__
        if max_norm is not None:
            max_norm = _positive(called, "max_norm", max_norm)
            norm_type = _positive(called, "norm_type", norm_type)
        rows = num_embeddings
        if rows is not None:
            rows = check_count(called, "num_embeddings", rows, 2**31 - 1)
        padding_idx = _from_the_start(called, rows, padding_idx)
        if padding_idx is not None:
            if options.get("padding_key") is not None:
                raise ValueError(f"{called}: padding_idx and padding_key cannot both be given")
            options["padding_key"] = padding_idx
        initializer = options.get("embedding_initializer") or Normal(0.0, 1.0)
        options["embedding_initializer"] = initializer
        dim = check_count(called, "embedding_dim", embedding_dim)
        super().__init__(TableOptions(rows, dim, use_hashtable, dtype, device, **options))
        self.padding_idx = padding_idx
        self.max_norm, self.norm_type = max_norm, norm_type

    @property
    def num_embeddings(self) -> int:
        """Number of rows in this process's table."""
        return self.capacity

    @property
    def embedding_dim(self) -> int:
        """Length of a vector."""
        return self.embedding_vec_size

    def extra_repr(self) -> str:
        """Return the base class's text, with padding_key and max_norm added."""
        padding = "" if self.padding_key is None else f", padding_key={self.padding_key}"
        limit = "" if self.max_norm is None else f", max_norm={self.max_norm}"
        return f"{super().extra_repr()}{padding}{limit}"


def _positive(name: str, argument: str, value: Any) -> float:
    number = check_number(name, argument, value)
    if not number > 0:
        raise ValueError(f"{name}: {argument} must be > 0, got {value}")
    return number


def _from_the_start(name: str, rows: int | None, padding_idx: int | None) -> int | None:
    """Return padding_idx as a nonnegative index; a negative padding_idx counts from the end."""
    if padding_idx is None:
        return None
    if rows is None:
        if padding_idx < 0:
            raise ValueError(
                f"{name}: padding_idx={padding_idx} counts from the end, which num_embeddings=None "
                f"leaves open; padding_key takes any key"
            )
        return padding_idx
    if not -rows <= padding_idx < rows:
        raise ValueError(
            f"{name}: padding_idx must be within num_embeddings, in [{-rows}, {rows}), got "
            f"{padding_idx}; padding_key takes any key"
        )
    return padding_idx % rows


def rows_of(
    name: str, embeddings: torch.Tensor, padding_idx: int | None, num_embeddings: int | None
) -> tuple[int, int | None]:
    """Return the row count of a table for these vectors, and padding_idx made nonnegative."""
    if embeddings.dim() != 2:
        raise ValueError(
            f"{name}: embeddings must be [n, dim], got shape {tuple(embeddings.shape)}"
        )
    n = len(embeddings)
    if num_embeddings is not None and num_embeddings < n:
        raise ValueError(
            f"{name}: num_embeddings must be at least the {n} rows of embeddings, got "
            f"{num_embeddings}"
        )
    return num_embeddings or n, _from_the_start(name, n, padding_idx)


def with_vectors(layer: _Layer, vectors: torch.Tensor, freeze: bool) -> _Layer:
    """Assign the vectors to the ids 0, 1, 2, ..., and return the layer.

    The padding id also gets a row, although no lookup reads it. In a single process, the row number
    of each id is then the id itself, so code that reads the weight directly works as before.
    """
    ids = torch.arange(len(vectors), dtype=layer.key_dtype, device=vectors.device)
    assign_own(layer, ids, vectors)
    layer.weight.requires_grad_(not freeze)
    return layer
