"""Nested states as JSON and tensors: what ``state_dict`` returns, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .tensor_file import check_storable

# How JSON says what it has no words for. A dict that has such a key itself is written as items.
_TENSOR, _TUPLE, _ITEMS, _FLOAT = "$tensor", "$tuple", "$items", "$float"
_SCALAR = "$scalar"
_SCALARS = {"float32": torch.float32, "float64": torch.float64, "int32": torch.int32}
# Levels of lists, tuples and dicts that a state may have, saved or loaded.
MOST_NESTED = 100


def encoded(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = 2) -> Any:
    """A value as JSON; tensors in it go to ``tensors``, by their path.

    Args:
        value: what a manifest has two levels deep, as ``ranks[0]["state"]["name"]``.
        name: of it, for errors and the tensors.
        tensors: to add to.
        depth: how deep `check_nesting` will find it.

    Raises:
        CheckpointError: something that is no tensor, number, text, None, or a list, tuple or dict
            of these, or is nested deeper than `check_nesting` lets through; named by its path.
    """
    if depth > MOST_NESTED:
        raise CheckpointError(f"{name}: a state is nested deeper than {MOST_NESTED - 2}")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor):
        check_storable(name, value)
        while name in tensors:  # the path of {"a.b": x} is that of {"a": {"b": x}}
            name += "+"
        tensors[name] = value.detach()
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        plain = all(isinstance(key, str) and not key.startswith("$") for key in value)
        if plain:
            return {
                key: encoded(each, f"{name}.{key}", tensors, depth + 1)
                for key, each in value.items()
            }
        return {
            _ITEMS: [
                [
                    encoded(key, name, tensors, depth + 2),
                    encoded(each, f"{name}.{key}", tensors, depth + 2),
                ]
                for key, each in value.items()
            ]
        }
    if isinstance(value, list | tuple):
        listed = [encoded(each, f"{name}.{i}", tensors, depth + 1) for i, each in enumerate(value)]
        return listed if isinstance(value, list) else {_TUPLE: listed}
    raise CheckpointError(
        f"{name}: a checkpoint has tensors, numbers and text, in lists, tuples and dicts, but no "
        f"{type(value).__name__}"
    )


def scalar(tensor: torch.Tensor, name: str) -> Any:
    """A 0-dim tensor as JSON: int64, which counts steps, as a number; ``name`` is for errors."""
    value = tensor.item()
    if tensor.dtype == torch.int64:
        return value
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _SCALARS:
        raise CheckpointError(f"{name}: a number for a table cannot be {tensor.dtype}")
    return {_SCALAR: [dtype, encoded(value, "", {})]}


def check_nesting(value: Any, depth: int = 0) -> None:
    """Raise CheckpointError where levels would be too many for `decoded`, which calls itself."""
    if depth > MOST_NESTED:
        raise CheckpointError(f"a state is nested deeper than {MOST_NESTED}")
    if isinstance(value, dict) and value.keys() in ({_TUPLE}, {_ITEMS}):
        (value,) = value.values()  # which are one level with what is in them
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_nesting(each, depth + 1)


def decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode what `encoded` has written, once `check_nesting` found it not too deep.

    Raises:
        CheckpointError: a tensor is missing, or it is nothing that encoded writes.
    """
    if isinstance(value, list):
        return [decoded(each, tensors) for each in value]
    if not isinstance(value, dict):
        return value
    (kind, content), *rest = value.items() or [("", None)]
    if rest or not kind.startswith("$"):
        return {key: decoded(each, tensors) for key, each in value.items()}
    try:
        return _special(kind, content, tensors)
    except CheckpointError:
        raise
    except (TypeError, ValueError, OverflowError, RuntimeError, KeyError):
        raise CheckpointError(f"a state has {value!r:.80}, which stands for nothing") from None


def _special(kind: str, content: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The value of an object that JSON has no word for; any error means that there is none."""
    if kind == _TENSOR:
        return tensors[content]
    if kind == _TUPLE and isinstance(content, list):
        return tuple(decoded(content, tensors))
    if kind == _SCALAR:
        dtype, number = content
        number = decoded(number, tensors)
        if isinstance(number, int | float):
            return torch.tensor(number, dtype=_SCALARS[dtype])
    if kind == _FLOAT and content in ("inf", "-inf", "nan"):
        return float(content)
    if kind == _ITEMS and isinstance(content, list):
        pairs = decoded(content, tensors)
        if all(isinstance(pair, list) and len(pair) == 2 and _hashable(pair[0]) for pair in pairs):
            return dict(pairs)
    raise ValueError(kind)


def _hashable(key: Any) -> bool:
    return isinstance(key, int | float | str | bool | tuple) or key is None
