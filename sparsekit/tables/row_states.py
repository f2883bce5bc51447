"""Keeps optimizer states with their keys when rows are given to other keys.

A state whose rows may differ from the table's has an entry "keys" in addition to its tensors: the
key of each of its rows, or None if a loaded state does not contain the keys. The entry is removed
in the same step that matches the states with the table's rows, so that nothing is lost if that step
is interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from ..memory import first_rows_of, is_mapped, untouched_like
from ..row_files import RowFiles
from .hash_table import HashTable


def follow_keys(optimizer: torch.optim.Optimizer, weight: torch.Tensor, keys: torch.Tensor) -> None:
    """Move an optimizer's states for a weight to the current rows of their keys.

    Keys without a state start like new keys.

    Args:
        optimizer: any optimizer, with or without states for this weight.
        weight: ``[capacity, dim]``.
        keys: int64 ``[rows in use]``, the key of each row.
    """
    state = optimizer.state.get(weight)
    if not state or "keys" not in state:
        return
    before = state["keys"]
    if before is None:
        del state["keys"]
        return
    before = before.to(keys.device)
    initial = _initial_values(optimizer, weight)
    names = _of_rows(state, weight)
    reach = reach_of(weight)
    # If there were no keys before, states may be left over from a table that was dropped.
    end = len(before) or (len(weight) if reach is None else reach)
    both = min(len(before), len(keys))
    moved = bool((before[:both] != keys[:both]).any())
    sparse = any(state[name].is_sparse for name in names)
    if not moved and not sparse:
        # Fill in place, since there may be no memory for a copy. An interrupted fill can be
        # repeated.
        for name in names:
            state[name][both:end].fill_(initial.get(name, 0.0))
        del state["keys"]
        return
    lookup = HashTable(max(1, len(before)), device=keys.device)
    lookup.find_or_insert(before)
    of_rows = lookup.find(keys)  # the row that each key had before
    rows = (of_rows >= 0).nonzero().squeeze(1)
    taken = of_rows[rows]
    found: dict[str, torch.Tensor] = {}
    for name in names:
        if state[name].is_sparse:
            found[name] = _moved_sparse(state[name], taken, rows)
    strided = {name: state[name] for name in names if name not in found}
    for name, tensor in _new_like(strided, weight).items():
        if initial.get(name, 0.0) != 0:
            tensor[:reach].fill_(initial[name])
        tensor[rows] = state[name][taken]
        found[name] = tensor
    rest = {name: value for name, value in state.items() if name != "keys"}
    optimizer.state[weight] = {**rest, **found}


def row_tensors(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor
) -> list[tuple[str, torch.Tensor, float]]:
    """Return the name, tensor and initial value of each state with a row for every weight row."""
    state = optimizer.state.get(weight)
    if not state:
        return []
    if "keys" in state:  # the states have not followed the keys yet
        follow_keys(optimizer, weight, weight.keys())  # type: ignore[attr-defined]
        state = optimizer.state[weight]
    initial = _initial_values(optimizer, weight)
    return [(name, state[name], initial.get(name, 0.0)) for name in _of_rows(state, weight)]


def initial_rows(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor
) -> list[tuple[torch.Tensor, float]]:
    """Return the states whose rows do not start at zero, and their initial values.

    Unlike `row_tensors`, this does not move states that have yet to follow their keys.
    """
    state = optimizer.state.get(weight)
    if not state:
        return []
    initial = _initial_values(optimizer, weight)
    names = [name for name in _of_rows(state, weight) if initial.get(name, 0.0) != 0]
    return [(state[name], initial[name]) for name in names if not state[name].is_sparse]


def states_of_rows(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return the states that have a row for every weight row, without moving them."""
    state = optimizer.state.get(weight) or {}
    return [state[name] for name in _of_rows(state, weight)]


def sparse_writes(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, new_rows: torch.Tensor
) -> list[partial[Any]]:
    """Return the calls that renumber the rows of sparse states, such as momentum.

    Args:
        optimizer: any optimizer.
        weight: ``[capacity, dim]``.
        new_rows: int32 ``[rows in use]``, the new number of each row, or -1 for a removed row.
    """
    kept = (new_rows >= 0).nonzero().squeeze(1)
    to = new_rows[kept].to(torch.int64)
    return [
        partial(dict.__setitem__, optimizer.state[weight], name, _moved_sparse(tensor, kept, to))
        for name, tensor, _ in row_tensors(optimizer, weight)
        if tensor.is_sparse
    ]


def _of_rows(state: Mapping[str, Any], weight: torch.Tensor) -> list[str]:
    """Return the names of the states that have a row for every weight row."""
    return [
        name
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.shape[:1] == weight.shape[:1]
        and name != "keys"
    ]


def _new_like(tensors: Mapping[str, torch.Tensor], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return zeros with the row shapes and dtypes of `tensors`, in the weight's file, if any."""
    if (files := files_of(weight)) is None:
        return untouched_like(tensors, len(weight), reach_of(weight))
    # Step counts stay in memory, as in `new_states`.
    counts = {name: one for name, one in tensors.items() if not one.is_floating_point()}
    rest = {name: (one.shape[1:], one.dtype) for name, one in tensors.items() if name not in counts}
    return untouched_like(counts, len(weight)) | files.states(weight, rest)


def _initial_values(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> Mapping[str, float]:
    """Return the initial value of each state, by name; a state without an entry starts at 0."""
    group = next(g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
    own: Callable[..., Mapping[str, float]] | None = getattr(optimizer, "initial_values", None)
    if own is not None:
        return own(weight, group)
    return {"sum": group.get("initial_accumulator_value", 0.0)}  # as in torch's Adagrad


def _moved_sparse(state: torch.Tensor, rows: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Return a sparse state, such as momentum in torch's SGD, with `rows` moved to rows `to`."""
    coalesced = state.coalesce()
    indices = coalesced.indices()[0]
    # Cover only the rows that occur here: a table that grows may have room for far more.
    count = 1 + max(int(part.max()) if len(part) else -1 for part in (rows, indices))
    places = torch.full((count,), -1, dtype=torch.int64, device=state.device)
    places[rows] = to
    now = places[indices]
    kept = now >= 0
    return torch.sparse_coo_tensor(
        now[kept].unsqueeze(0),
        coalesced.values()[kept],
        state.shape,
        device=state.device,
        check_invariants=False,
    ).coalesce()


def reach_of(weight: torch.Tensor) -> int | None:
    """Return `EmbeddingWeight.reach`; None for other tensors, whose rows are all in reach."""
    return getattr(weight, "reach", None)


def files_of(weight: torch.Tensor) -> RowFiles | None:
    """Return the files that hold a weight and its states; None if they are in memory."""
    return getattr(weight, "files", None)


def with_rows(
    state: Mapping[str, Any], weight: torch.Tensor, rows: int | None = None
) -> Mapping[str, Any]:
    """Return a weight's states cut to its first `rows` rows, or unchanged if all are needed.

    Args:
        state: the state.
        weight: the weight.
        rows: number of rows; None means `EmbeddingWeight.rows_to_copy`.
    """
    if not hasattr(weight, "rows_to_copy") or (copied := weight.rows_to_copy()) is None:
        return state
    own = {name: state[name] for name in _of_rows(state, weight)}
    return {**state, **first_rows_of(own, copied if rows is None else rows)}


def with_room(state: Mapping[str, Any], weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return, at full length, the tensors in a state that `with_rows` has shortened."""
    reach, files = reach_of(weight), files_of(weight)
    short = {
        name: value
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
        and value.dim()
        and name != "keys"
        and (len(value) == reach if files is None else _belongs_in_file(value, weight))
    }
    full = _new_like(short, weight) if short else {}
    for name, tensor in full.items():
        tensor[: len(short[name])] = short[name]
    return full


def _belongs_in_file(state: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether a state is in memory or too short, and so must move to the weight's file."""
    return len(state) < len(weight) or (state.is_floating_point() and not is_mapped(state))
