"""Checks that a saved optimizer state fits an optimizer, and loads it."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import CheckpointError
from ..optim.load_state import loaded_states
from ..optim.row_optimizer import RowOptimizer
from .encoding import decoded
from .load_table import TablePlan
from .snapshot import parameter_names
from .table_files import Folder


class OptimizerPlan:
    """Checks that a saved state fits an optimizer; `load` then loads it."""

    def __init__(
        self,
        folder: Folder,
        number: int,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, Any],
        names: Mapping[torch.Tensor, str],
        tensors: Mapping[str, torch.Tensor],
        tables: Mapping[torch.Tensor, TablePlan],
    ) -> None:
        self._optimizer = optimizer
        kind = type(optimizer).__name__
        if saved.get("kind") != kind:
            raise CheckpointError(
                f"{folder}: optimizer {number} is {saved.get('kind')}, and {kind} was given"
            )
        groups = decoded(saved.get("groups"), tensors)
        states = decoded(saved.get("state"), tensors)
        _check_shapes(groups, states)
        own_names = parameter_names(optimizer, names)
        numbers = {name: i for i, name in enumerate(own_names.values())}
        own = [sorted(own_names[p] for p in g["params"]) for g in optimizer.param_groups]
        theirs = [sorted(group["params"]) for group in groups]
        if own != theirs:
            differs = sorted(set(itertools.chain(*own)) ^ set(itertools.chain(*theirs)))
            raise CheckpointError(
                f"{folder}: optimizer {number}, {kind}, has other parameters: "
                f"{', '.join(differs[:5]) or 'in other groups'}"
            )
        self._loaded: dict[str, Any] = {
            "state": {numbers[name]: values for name, values in states.items()},
            "param_groups": [],
        }
        for of_group, group in zip(groups, optimizer.param_groups, strict=True):
            in_group = [numbers[own_names[p]] for p in group["params"]]
            self._loaded["param_groups"].append({**of_group, "params": in_group})
            settings = {**group, **optimizer.defaults, **of_group}
            for parameter in group["params"]:
                plan = tables.get(parameter)
                if plan is not None and plan.table.optimizer is not None:
                    if plan.table.optimizer != number:
                        raise ValueError(f"table {plan.name} is of {plan.table.optimizer}")
                    plan.optimizer = optimizer
                    plan.check_states(settings)
        self._try()

    def _try(self) -> None:
        """Load the state into a copy of the optimizer, so that errors are raised before `load`."""
        for own, saved in zip(
            self._optimizer.param_groups, self._loaded["param_groups"], strict=True
        ):
            for name, value in saved.items():
                if name in own and name != "params" and not _alike(own[name], value):
                    raise TypeError(f"{name} is {value!r:.80}, and {own[name]!r:.80} here")
        parameters = itertools.chain(*(g["params"] for g in self._optimizer.param_groups))
        for number, parameter in enumerate(parameters):
            kept = self._optimizer.state.get(parameter, {})
            for name, value in self._loaded["state"].get(number, {}).items():
                if isinstance(known := kept.get(name), torch.Tensor):
                    one = torch.as_tensor(value)  # the value may have been saved as a number
                    if one.shape != known.shape:
                        raise ValueError(f"{name} is {list(one.shape)}, not {list(known.shape)}")
        if isinstance(self._optimizer, RowOptimizer):
            loaded_states(self._optimizer, self._loaded)
        else:
            _twin(self._optimizer).load_state_dict(self._loaded)

    def load(self) -> None:
        """Load the saved state into the optimizer."""
        self._optimizer.load_state_dict(self._loaded)


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return a copy of the optimizer, so that loading a state does not change the original."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [dict(group) for group in optimizer.param_groups]
    twin._optimizer_load_state_dict_pre_hooks = OrderedDict()  # hooks must run only once, in `load`
    twin._optimizer_load_state_dict_post_hooks = OrderedDict()
    return twin


def _check_shapes(groups: Any, states: Any) -> None:
    """Raise TypeError unless the values are structured like an optimizer's groups and states."""
    if not isinstance(groups, list) or not all(isinstance(each, dict) for each in groups):
        raise TypeError("groups must be a list of objects")
    for group in groups:
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError("params must be a list of names")
    if not isinstance(states, dict) or not all(isinstance(s, dict) for s in states.values()):
        raise TypeError("state must be an object of objects")


def _alike(own: Any, value: Any) -> bool:
    """Return whether a saved setting can replace the optimizer's setting."""
    if own is None or value is None:
        return True
    if isinstance(own, list | tuple):
        fits = isinstance(value, list | tuple) and len(own) == len(value)
        return fits and all(map(_alike, own, value))
    if isinstance(own, str):
        return isinstance(value, str)
    if isinstance(own, bool | int | float | torch.Tensor):
        number = not isinstance(value, torch.Tensor) or not value.dim()
        return isinstance(value, bool | int | float | torch.Tensor) and number
    return True
