"""Encodes nested states, such as a ``state_dict``, as JSON and tensors, without pickle."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import CheckpointError
from .tensor_file import check_storable, dtype_name

# Keys that mark values JSON cannot express. If a dict in the state has such a key itself, it is
# written as a list of items.
_TENSOR, _TUPLE, _ITEMS, _FLOAT = "$tensor", "$tuple", "$items", "$float"
_SCALAR = "$scalar"
_SCALARS = {"float32": torch.float32, "float64": torch.float64, "int32": torch.int32}
# Largest nesting depth of lists, tuples and dicts in a saved or loaded state.
MOST_NESTED = 100


def encoded(value: Any, name: str, tensors: dict[str, torch.Tensor], depth: int = 2) -> Any:
    """Encode a value as JSON, and collect its tensors by path.

    Args:
        value: a state, or a part of one.
        name: path of the value, used in errors and as a prefix of the tensors' paths.
        tensors: receives each tensor under its path.
        depth: nesting level of the value in the manifest, for `check_nesting`; 2 for
            ``ranks[0]["state"]["name"]``.

    Raises:
        CheckpointError: a part is not a tensor, number, string, None, list, tuple or dict; or it is
            nested deeper than `check_nesting` allows. The message gives the part's path.
    """
    if depth > MOST_NESTED:
        raise CheckpointError(f"{name}: a state is nested deeper than {MOST_NESTED - 2}")
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, torch.Tensor):
        check_storable(name, value)
        while name in tensors:  # {"a.b": x, "a": {"b": y}} has two tensors "a.b"
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
    """Encode a 0-dim tensor: int64 as a number, others with their dtype; ``name`` is for errors."""
    value = tensor.item()
    if tensor.dtype == torch.int64:
        return value
    dtype = dtype_name(tensor.dtype)
    if dtype not in _SCALARS:
        raise CheckpointError(f"{name}: a number for a table cannot be {tensor.dtype}")
    return {_SCALAR: [dtype, encoded(value, "", {})]}


def check_nesting(value: Any, depth: int = 0) -> None:
    """Raise CheckpointError if a value is nested too deeply for the recursive `decoded`."""
    if depth > MOST_NESTED:
        raise CheckpointError(f"a state is nested deeper than {MOST_NESTED}")
    if isinstance(value, dict) and value.keys() in ({_TUPLE}, {_ITEMS}):
        (value,) = value.values()  # a marker and its content count as one nesting level
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            check_nesting(each, depth + 1)


def decoded(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Decode the output of `encoded`; call `check_nesting` on it first.

    Raises:
        CheckpointError: a tensor is missing, or ``value`` is not a possible output of `encoded`.
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
    """Decode an object that encodes a value JSON cannot express. The caller catches errors."""
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
