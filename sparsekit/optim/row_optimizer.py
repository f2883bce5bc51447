"""Base of all optimizers: extracts rows from gradients, keeps states, and calls the fused op."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, cast

import torch

from .. import ops
from .._compiling import uncompiled
from ..distributed.dtensor import local
from ..errors import check_int
from ..tables.row_states import with_room, with_rows
from ..tables.weight import EmbeddingWeight, count_own_writes, update_of
from ..tables.written_rows import Write, have_marks
from .fused_call import FusedCalls
from .load_state import keep_kind, loaded_states, with_keys
from .settings import Allowed, allowed_values, rate_on
from .update_call import (
    Update,
    UpdateCall,
    as_rows,
    by_kind,
    check_parameter,
    new_states,
    prepare_states,
    rows_of,
    with_gradients,
)

Rows = tuple[torch.Tensor | None, torch.Tensor]


class RowOptimizer(torch.optim.Optimizer):
    """Base of the optimizers; a subclass defines its rule and states (see `ops.update_rows_`).

    The settings of an optimizer are its constructor's arguments, whose annotations contain the
    allowed values (`settings.py`). The learning rate may be a tensor of one element, float32 or
    float64, on the CPU or on the parameters' device, where kernels read it.

    Parameters are float32, float64 or bfloat16 and contiguous; the states of bfloat16 parameters
    are float32. A sparse gradient consists of rows (sparse_dim 1), which may repeat; a dense one
    touches all rows. ``state[parameter]`` contains ``step``, an int64 tensor, and the states by
    name, each in the parameter's shape. For a DTensor, as created by ``fully_shard``, each rank
    updates its own shard, and states have the shard's shape.

    One call updates all parameters of a group that share a dtype, a device, and the kind of
    gradient (sparse or dense); it checks all of them before it changes any.

    If a step is interrupted, for example by Ctrl-C, each parameter and its states have either their
    old or their new values; ``state[parameter]["step"]`` tells which. As in torch, calling `step`
    again with the same gradients applies the step to all parameters; to continue, call
    ``zero_grad`` and take the next batch. An interrupted update in backward counts as done until
    `step` is called.

    Raises:
        TypeError: a seed that is not an int; (in step) a parameter of another dtype.
        ValueError: (in step) a parameter that is not contiguous, or a sparse gradient of single
            elements rather than rows (sparse_dim > 1).
        RuntimeError: (in backward) a second update of a layer since the last step, if
            `fuse_in_backward` is in use.
    """

    rule: ClassVar[str]
    row_states: ClassVar[tuple[str, ...]] = ()  # states with one number per row
    _allowed: ClassVar[dict[str, Allowed]] = {}  # allowed values of each setting

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        cls._allowed = cls._allowed | allowed_values(cls.__init__)

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if isinstance(params, torch.nn.Module):
            raise TypeError(
                f"{type(self).__name__}: params must be parameters, not a module; pass its "
                f"parameters()"
            )
        defaults = {"stochastic_rounding": False, "seed": 0, "maximize": False, **defaults}
        defaults["seed"] = check_int(
            type(self).__name__, "seed", defaults["seed"], -(2**63), 2**64 - 1
        )
        self._updated: set[torch.Tensor] = set()  # weights updated in backward since the last step
        self._layers: dict[torch.Tensor, str] = {}  # layer names of weights that backward updates
        # Callback that backward uses to update weights; see fuse_in_backward.
        self._attached: weakref.WeakMethod[Any] | None = None
        self._fused = FusedCalls()
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as torch.optim.Optimizer does, and check its settings.

        Raises:
            TypeError: a setting is not a number but must be one.
            ValueError: a setting is out of range, or another optimizer updates a weight in
                backward.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_settings(group)
            for parameter in group["params"]:
                if update_of(parameter) is not None:
                    raise ValueError(
                        f"{type(self).__name__}: a parameter of shape {tuple(parameter.shape)} is "
                        f"updated in backward by another optimizer; remove() what its "
                        f"fuse_in_backward has returned"
                    )
            self._follow_keys(group)
            for parameter in group["params"]:
                prepare_states(parameter, self._initial_states(group), self.row_states)
        except (TypeError, ValueError, OSError, RuntimeError):
            self.param_groups.pop()
            raise

    def _follow_keys(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if isinstance(parameter, EmbeddingWeight):
                parameter.is_stepped_by(self)

    def _check_settings(self, group: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for a setting that its annotation does not allow."""
        for name, allowed in self._allowed.items():
            allowed.check(type(self).__name__, name, group[name])

    def _initial_states(self, group: dict[str, Any]) -> dict[str, float]:
        """Return the initial value of each state by name, in the order of the rule's states."""
        raise NotImplementedError

    def _settings(self, group: dict[str, Any]) -> list[float]:
        """Return the rule's settings except lr, in the order of `ops.update_rows_`."""
        raise NotImplementedError

    def _per_row(self, group: dict[str, Any]) -> bool:
        """Return whether each row counts its own steps."""
        return group.get("bias_correction") == "per_row"

    def _has_row_step(self, group: dict[str, Any]) -> bool:
        """Return whether the states include a step count for each row."""
        return self._per_row(group)

    @uncompiled
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient; return the closure's loss, or None."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Check all gradients before any parameter is changed.
        updates = [
            [(one, *self._gradient(one, group)) for one in with_gradients(group["params"])]
            for group in self.param_groups
        ]
        for group, of_group in zip(self.param_groups, updates, strict=True):
            for parameter, _, _ in of_group:
                self._take_over(parameter)
            if of_group:
                self._update(group, of_group)
        self._updated.clear()
        return loss

    @torch.no_grad()
    def update_in_backward(
        self,
        weights: list[torch.Tensor],
        updates: Callable[[], Sequence[Update]],
        update: Callable[..., None] | None,
    ) -> None:
        """Apply a step to some embedding layers' weights, for `fuse_in_backward`.

        Args:
            weights: the weights to update.
            updates: returns the weights, each with its distinct rows and the rows' gradients.
            update: sums the gradients and applies a step to these rows; takes the arguments of
                `group_embedding_bag_update_` from `weights` onward. None if the gradients
                themselves are needed.
        """
        last = self._fused.find(weights, self)
        wanted = set(weights) if last is None else last.distinct
        if twice := self._updated & wanted:
            layer = self._layers[next(weight for weight in weights if weight in twice)]
            raise RuntimeError(
                f"{type(self).__name__}: two updates of {layer} without step() between them. With "
                f"fuse_in_backward every backward is an update: call step() after it, and do not "
                f"look a layer up twice in one backward or accumulate gradients"
            )
        if last is not None and update is not None and last.repeated(self, update):
            return
        for weight in weights:
            self._take_over(weight)
        groups = [g for g in self.param_groups if not wanted.isdisjoint(g["params"])]
        alone = groups[0] if update is not None and len(groups) == 1 else None
        if alone is None:  # otherwise the op itself checks them
            for weight in weights:
                check_parameter(type(self).__name__, weight)
        self._updated |= wanted  # set first, so that an interrupted update is not applied twice
        if update is not None and alone and self._update_summing(alone, weights, update):
            return
        listed = updates()
        for group in groups:
            own = set(group["params"])
            self._update(group, [one for one in listed if one[0] in own])

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return False, or raise to stop GradScaler, which reads this property before a step.

        Raises:
            RuntimeError: a layer has been updated in backward, with a scaled gradient.
        """
        if self._updated:
            layers = ", ".join(self._layers[parameter] for parameter in self._updated)
            raise RuntimeError(
                f"{type(self).__name__}: GradScaler cannot unscale gradients that are used up in "
                f"backward, and {layers} has been updated with scaled ones; do not use both it and "
                f"fuse_in_backward"
            )
        return False

    def forget_updates(self) -> None:
        """Forget updates made in backward since the last step; called after a failed capture."""
        self._updated.clear()

    def _take_over(self, parameter: torch.Tensor) -> None:
        """Move each state to its key's current row, before the parameter is updated.

        If another optimizer has yet to apply some steps to the rows, it does so first.
        """
        if "keys" in self.state.get(parameter, ()) and isinstance(parameter, EmbeddingWeight):
            parameter.settle(self)
        before_read = getattr(parameter, "before_read", None)
        if before_read is not None and getattr(before_read, "__self__", self) is not self:
            before_read(parameter, None)

    def _gradient(self, parameter: torch.Tensor, group: dict[str, Any]) -> Rows:
        """Return a parameter's rows that have a gradient (None for all), and the gradients."""
        check_parameter(type(self).__name__, local(parameter))
        rate_on(parameter.device, type(self).__name__, group["lr"])
        grad = local(cast(torch.Tensor, parameter.grad))
        if update_of(parameter) is not None:
            layer = self._layers.get(parameter, f"a weight of shape {tuple(parameter.shape)}")
            raise ValueError(
                f"{type(self).__name__}: {layer} is updated in backward and has a gradient "
                f"besides; fuse_in_backward is for weights that are used by their layer only"
            )
        if not grad.is_sparse:
            return None, grad
        if grad.sparse_dim() != 1:
            raise ValueError(
                f"{type(self).__name__}: a sparse gradient must be one of rows (sparse_dim 1), got "
                f"sparse_dim {grad.sparse_dim()} for a parameter of shape {tuple(parameter.shape)}"
            )
        return rows_of(grad)

    def _update(self, group: dict[str, Any], updates: Sequence[Update]) -> None:
        """Apply a step to some parameters of a group."""
        if group["maximize"]:
            updates = [(parameter, rows, -grad) for parameter, rows, grad in updates]
        dense = [rows is None for _, rows, _ in updates]
        for call in self._calls(group, [parameter for parameter, _, _ in updates], dense):
            taken = [updates[i] for i in call.positions]
            for weight in (w for w, r, _ in taken if r is None and isinstance(w, EmbeddingWeight)):
                weight.moved = True
            write = Write([parameter for parameter, _, _ in taken])
            ops.update_rows_(
                call.weights, call.states, call.row_steps,
                [rows for _, rows, _ in taken if rows is not None],
                [as_rows(w, r, g) for w, (_, r, g) in zip(call.weights, taken, strict=True)],
                call.steps, **self._step(group, call.weights[0].device),
            )  # fmt: skip
            write.done([rows for _, rows, _ in taken])

    def _may_sum(self, group: dict[str, Any], weights: Sequence[torch.Tensor]) -> bool:
        """Return whether `_update_summing` is possible; it can neither mark rows nor maximize."""
        return not (group["maximize"] or have_marks(weights))

    def _update_summing(
        self, group: dict[str, Any], weights: list[torch.Tensor], update: Callable[..., None]
    ) -> bool:
        """Sum the gradients of embedding layers' weights and apply the step, in a single pass.

        Returns:
            True on success; False, with nothing changed, if a single pass is not possible.
        """
        if not self._may_sum(group, weights):
            return False
        calls = self._calls(group, weights, [False] * len(weights))
        if len(calls) > 1:
            return False
        (call,) = calls
        step = self._step(group, call.weights[0].device)
        update(call.weights, call.states, call.row_steps, call.steps, **step)
        count_own_writes(weights)
        self._fused.keep(weights, self, group)
        return True

    def _step(self, group: dict[str, Any], device: torch.device) -> dict[str, Any]:
        """Return those arguments of the update ops that are the same for all parameters."""
        number, lr = rate_on(device, type(self).__name__, group["lr"])
        return {
            "rule": self.rule,
            "settings": [number, *self._settings(group)],
            "per_row": self._per_row(group),
            "rounding_seed": group["seed"] if group["stochastic_rounding"] else None,
            "count_steps": True,
            "lr": lr,
        }

    def _calls(
        self, group: dict[str, Any], parameters: Sequence[torch.Tensor], dense: Sequence[bool]
    ) -> list[UpdateCall]:
        """Split the parameters of a group into sets that one call can update."""
        names = list(self._initial_states(group))
        needed = {"step", *names, *(["row_step"] if self._has_row_step(group) else [])}
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not needed <= state.keys():
                self._add_states(parameter, group, state)
        shards = [local(parameter) for parameter in parameters]
        return by_kind(shards, dense, states, names, self.row_states)

    def _add_states(
        self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]
    ) -> None:
        """Add any states missing before the first step or after a change of settings."""
        new = {"step": torch.zeros((), dtype=torch.int64, device=parameter.device)}
        row_step = {"row_step"} if self._has_row_step(group) else set()
        if not self._initial_states(group).keys() | row_step <= state.keys():
            # This is the first step, or a changed setting needs more states.
            new |= self._new_states(parameter, group)
        state.update(new | state)  # one call, so that an interrupt cannot leave only some states

    def initial_values(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, float]:
        """Return, by name, each state's value for a row that no step has touched."""
        initial = self._initial_states(group)
        if self._has_row_step(group):
            # Unless rows count their own steps, an untouched row counts as having taken all steps.
            counts = self._per_row(group)
            initial["row_step"] = 0 if counts else int(self.state[parameter].get("step", 0))
        return initial

    def _new_states(
        self, parameter: torch.Tensor, group: dict[str, Any]
    ) -> dict[str, torch.Tensor]:
        initial, row_step = self._initial_states(group), self._has_row_step(group)
        return new_states(local(parameter), initial, self.row_states, row_step)

    def __getstate__(self) -> dict[str, Any]:
        states = {weight: with_rows(own, weight) for weight, own in self.state.items()}
        return {**super().__getstate__(), "state": defaultdict(dict, states)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # those from torch or other versions may be incomplete
            for name, value in (state.get("defaults") or self.defaults).items():
                group.setdefault(name, value)
        own = {"_layers": {}, "_attached": None} | self.__dict__
        kept = {name: own[name] for name in ("_layers", "_attached")}
        # A single call, so that an interrupt cannot leave only some of the attributes set.
        super().__setstate__({"_updated": set(), "_fused": FusedCalls(), **kept, **state})
        for group in self.param_groups:
            self._follow_keys(group)
        for weight, of_weight in self.state.items():
            of_weight.update(with_room(of_weight, weight))

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch.optim.Optimizer does, plus the keys of tables.

        The state of a table's weight also has ``keys``, int64 ``[n]``: the key of each row.
        """
        packed = super().state_dict()
        for group, of_group in zip(self.param_groups, packed["param_groups"], strict=True):
            for parameter, number in zip(group["params"], of_group["params"], strict=True):
                # Do not add keys to an empty state: reading a missing state creates one.
                if isinstance(parameter, EmbeddingWeight) and (own := packed["state"].get(number)):
                    packed["state"][number] = with_keys(own, parameter)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, possibly from torch's optimizer of the same name or from another device.

        States of bfloat16 parameters stay float32. Settings are replaced by the saved settings, as
        in torch, including mode, form and bias correction. A learning rate that is a tensor stays
        the same tensor, and a number stays a number. For a layer with a hash table, the saved
        table's capacity may have been different; rows that the state lacks start like new rows.

        Raises:
            ValueError: the state belongs to another optimizer, has the wrong shapes, has more rows
                than the table or fewer than are in use, or has settings that this optimizer lacks;
                nothing has been changed.
        """
        loaded = loaded_states(self, state_dict)
        # Key the states by parameter, since torch then keeps them as they are. It would cast states
        # keyed by index to the parameter's dtype, which is wrong for some states.
        rates = [group["lr"] for group in self.param_groups]
        super().load_state_dict({**state_dict, "state": loaded})
        for group, lr in zip(self.param_groups, rates, strict=True):
            group["lr"] = keep_kind(lr, group["lr"])
