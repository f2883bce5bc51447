"""Repeats updates in backward, skipping the work that is the same in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.autograd.graph import increment_version

from .._pybind import dict_is, each_dict_has, each_is, lists_are, no_dict_has
from ..tables.kept_tensors import KeptTensors
from ..tables.weight import count_own_writes
from .update_call import State

# Maximum number of calls to keep.
_MOST_KEPT = 64


class Steps(Protocol):
    """The part of a `RowOptimizer` that determines the arguments of a step."""

    param_groups: list[dict[str, Any]]
    state: Any
    _updated: set[torch.Tensor]

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]: ...

    def _may_sum(self, group: dict[str, Any], weights: Sequence[torch.Tensor]) -> bool: ...

    def _has_row_step(self, group: dict[str, Any]) -> bool: ...

    def _step(self, group: dict[str, Any], device: torch.device) -> dict[str, Any]: ...


@dataclass(slots=True)
class FusedCall:
    """An earlier update of weights in backward, kept so that it can be repeated."""

    weights: list[torch.Tensor]
    distinct: set[torch.Tensor]
    group: dict[str, Any]
    parameters: list[torch.Tensor]  # all parameters of the group
    stepped: list[torch.Tensor]  # the optimizer's parameters that have states
    states: list[State]  # the states of each parameter in `stepped`
    own_states: list[State]  # the states of each weight in `weights`
    # Set by the second call, which many programs never make.
    kept: KeptTensors | None = None
    keys: list[str] = field(default_factory=list)  # names of the states in `kept`
    of_states: list[torch.Tensor] = field(default_factory=list)  # these states, weight by weight

    def is_for(self, weights: Sequence[torch.Tensor], optimizer: Steps) -> bool:
        """Return whether the call was for these weights, and their states' dicts are the same."""
        return (
            weights is self.weights
            and any(group is self.group for group in optimizer.param_groups)
            and lists_are(self.group["params"], self.parameters)
            and dict_is(optimizer.state, self.stepped, self.states)
            and no_dict_has(self.own_states, "keys")
        )

    def repeated(self, optimizer: Steps, update: Callable[..., None]) -> bool:
        """Repeat the call; return False, without changing anything, if its inputs have changed."""
        group, weights = self.group, self.weights
        if not optimizer._may_sum(group, weights) or not each_is(weights, "before_read", None):
            return False
        needs_row_step = optimizer._has_row_step(group)
        kept = self._kept_for(list(optimizer._initial_states(group)), needs_row_step)
        if kept is None:
            return False
        step = optimizer._step(group, weights[0].device)
        optimizer._updated |= self.distinct  # first: an interrupted update must not be repeated
        update(*kept.arguments, **step)
        increment_version(kept.aliases)  # `update` sees only a stand-in, so it cannot do this
        count_own_writes(weights)
        return True

    def _kept_for(self, names: list[str], row_step: bool) -> KeptTensors | None:
        """Return the op's lists of tensors; None if a weight or state has been replaced.

        Args:
            names: names of the rule's states.
            row_step: whether the states must include a step count for each row.
        """
        kept, states = self.kept, self.own_states
        has_row_step = "row_step" in states[0]
        if row_step and not has_row_step:
            return None
        row_steps = ["row_step"] if has_row_step else []
        keys = [*names, "step", *row_steps]
        if kept is not None:
            same = self.keys == keys and each_dict_has(states, keys, self.of_states)
            return kept if same and kept.in_place() else None
        try:
            self.of_states = [state[key] for state in states for key in keys]
            lists = (
                self.weights,
                [state[name] for state in states for name in names],
                [state[name] for state in states for name in row_steps],
                [state["step"] for state in states],
            )
        except KeyError:
            return None
        self.kept, self.keys = KeptTensors(lists), keys
        return self.kept


class FusedCalls:
    """An optimizer's latest updates of several weights in backward."""

    def __init__(self) -> None:
        self._calls: dict[int, FusedCall] = {}  # keyed by the id of each call's first weight

    def find(self, weights: Sequence[torch.Tensor], optimizer: Steps) -> FusedCall | None:
        """Return an earlier call that can be repeated to update these weights, or None."""
        call = self._calls.get(id(weights[0]))
        return call if call is not None and call.is_for(weights, optimizer) else None

    def keep(self, weights: list[torch.Tensor], optimizer: Steps, group: dict[str, Any]) -> None:
        """Keep a call that has updated these weights of a group."""
        if len(weights) == 1:
            return  # updating a single weight is fast anyway
        if len(self._calls) >= _MOST_KEPT:
            self._calls.clear()
        state = optimizer.state
        self._calls[id(weights[0])] = FusedCall(
            *(weights, set(weights), group, list(group["params"]), list(state)),
            *(list(state.values()), [state[weight] for weight in weights]),
        )
