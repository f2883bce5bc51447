"""Saves a trained model to one file, and loads it on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist

from .._replacing import replacing
from ..nn import DistributedEmbedding

_Model = TypeVar("_Model", bound="SavedModel")


class SavedModel(torch.nn.Module):
    """Base class of models that are saved to one file, whatever the number of ranks."""

    FORMAT: ClassVar[str]
    """Format name in the file."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which any number of ranks can load.

        A collective, since each rank holds a part of the tables. Rank 0 writes the file, and needs
        memory for all tables.

        Raises:
            OSError: (on rank 0) the file cannot be written; an existing file is left unchanged.
        """
        saved = {"format": self.FORMAT, **self.content()}
        if not dist.is_initialized() or dist.get_rank() == 0:
            with replacing(path) as part:
                torch.save(saved, part)

    @classmethod
    def load(cls: type[_Model], path: str | os.PathLike[str]) -> _Model:
        """Load a model written by `save` onto the CPU (a collective call).

        Raises:
            ValueError: the file does not contain such a model.
            OSError: the file cannot be read.
        """
        return cls.restored(read(path, cls.FORMAT))

    def content(self) -> dict[str, Any]:
        """Return everything that `restored` needs, on rank 0 (a collective call)."""
        raise NotImplementedError

    @classmethod
    def restored(cls: type[_Model], state: Mapping[str, Any]) -> _Model:
        """Rebuild a model from the result of `content` (a collective call)."""
        raise NotImplementedError


def all_items(layer: DistributedEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys ``[n]`` and vectors ``[n, dim]`` of all ranks on rank 0's CPU.

    Other ranks get empty tensors.
    """
    own = [(items.keys.cpu(), items.vectors.cpu()) for items in layer.items()]
    parts: list[Any] = [own]
    if dist.is_initialized():
        into = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(own, into)
        parts = into or []
    pieces = [piece for part in parts for piece in part]
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, layer.embedding_vec_size)
    keys, vectors = zip(none, *pieces, strict=True)
    return torch.cat(keys), torch.cat(vectors)


def read(path: str | os.PathLike[str], *expected: str) -> dict[str, Any]:
    """Read the content of a model written by `SavedModel.save`.

    Args:
        path: path of the file.
        expected: accepted values of the file's entry ``"format"``.

    Raises:
        ValueError: the file does not contain such a model.
        OSError: the file cannot be read.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # for other files, unpickling may raise any error
        saved = None
    found = saved.get("format") if isinstance(saved, dict) else None
    if isinstance(found, str) and found.startswith("sparsekit ") and found not in expected:
        wanted = " or ".join(map(repr, expected))
        raise ValueError(f"{os.fspath(path)}: holds a model of {found!r}; needed is {wanted}")
    if not isinstance(saved, dict) or found not in expected:
        raise ValueError(f"{os.fspath(path)}: no model that sparsekit train --save has written")
    return saved
