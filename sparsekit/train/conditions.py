"""Detects changes that replays of a captured step would ignore."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch

from .._overrides import without_overrides
from .._pybind import TensorPlaces, dict_has
from ..tables.embedding_table import EmbeddingTable

# Attributes of a table that are not options: they change as the table is used.
_NO_OPTIONS = {"training", "changes", "checked_modes", "plan_cache"}
# Attributes of an embedding layer's weight that optimizers set.
_OF_WEIGHT = ("update_in_backward", "before_read")


class Conditions:
    """Everything that must not change between the capture of a step and its replays.

    These are the tensors of modules and optimizers with their addresses and shapes, and the values
    of modes, options and settings. A check runs before each replay; to be fast, it compares
    identities first.
    """

    def __init__(
        self,
        modules: Sequence[tuple[str, torch.nn.Module]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        # Tuples of the owner's name, one of the owner's dicts, some of its keys, and their values.
        self._entries: list[tuple[str, dict[Any, Any], list[Any], list[Any]]] = []
        # Tuples of the owner's name, one of the owner's dicts, and a key that it lacks.
        self._absent: list[tuple[str, dict[Any, Any], Any]] = []
        # Tuples of the owner's name, a collection's name, the collection and its items or keys.
        self._collections: list[tuple[str, str, Any, list[Any]]] = []
        # Tuples of a table's name, the table, its `changes` counter and its options.
        self._options: list[tuple[str, EmbeddingTable, int, dict[str, Any]]] = []
        for name, module in modules:
            self._add_module(name or "the model", module)
        for number, optimizer in enumerate(optimizers):
            self._add_optimizer(f"optimizer {number}, a {type(optimizer).__name__}", optimizer)
        values = {id(value): value for *_, values in self._entries for value in values}.values()
        tensors = [value for value in values if isinstance(value, torch.Tensor)]
        # Tensors of tables have at most two dimensions; other tensors may have more.
        self._flat = [tensor for tensor in tensors if tensor.dim() <= 2]
        self._flat_places = without_overrides(TensorPlaces, self._flat)
        self._places = [(tensor, _place_of(tensor)) for tensor in tensors]
        self._other_places = [(one, place) for one, place in self._places if one.dim() > 2]

    def _add_module(self, owner: str, module: torch.nn.Module) -> None:
        self._add(owner, module.__dict__, ["training"])
        for content in (module._parameters, module._buffers, module._modules):
            self._add(owner, content, content)
        if isinstance(module, EmbeddingTable):
            self._options.append((owner, module, module.changes, _options(module)))
            self._add(f"weight of {owner}", module.weight.__dict__, _OF_WEIGHT)

    def _add_optimizer(self, owner: str, optimizer: torch.optim.Optimizer) -> None:
        self._add(owner, optimizer.__dict__, ["state", "param_groups"])
        self._add_collection(owner, "param_groups", optimizer.param_groups)
        for group in optimizer.param_groups:
            self._add(owner, group, optimizer.defaults)  # other entries belong to schedulers
            self._add_collection(owner, "params", group["params"])
            for parameter in group["params"]:
                state = optimizer.state.get(parameter)
                if state is not None:
                    self._entries.append((owner, optimizer.state, [parameter], [state]))
                    self._add(owner, state, state)
                    self._add_collection(owner, "state", state)

    def _add(self, owner: str, content: dict[str, Any], keys: Iterable[str]) -> None:
        names = []
        for key in keys:
            if key in content:
                names.append(key)
            else:
                self._absent.append((owner, content, key))
        values = list(map(content.get, names))
        for i, (key, value) in enumerate(zip(names, values, strict=True)):
            if isinstance(value, list) and key != "param_groups":  # `_collections` has the groups
                values[i] = list(value)  # a copy, since a setting such as betas may change in place
        self._entries.append((owner, content, names, values))

    def _add_collection(self, owner: str, name: str, collection: Any) -> None:
        self._collections.append((owner, name, collection, list(collection)))

    def changes(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the name, the owner's name and the old value of each thing that has changed."""
        for owner, content, keys, values in self._entries:
            if dict_has(content, keys, values):
                continue
            for key, value in zip(keys, values, strict=True):
                now = content.get(key)
                if now is not value and not _equal(value, now):
                    yield key if isinstance(key, str) else "state", owner, value
        for owner, content, key in self._absent:
            if key in content:
                yield key, owner, None
        for owner, name, collection, items in self._collections:
            if len(collection) != len(items) or not all(map(is_, collection, items)):
                yield name, owner, items
        for number, (owner, table, changes, options) in enumerate(self._options):
            if table.changes != changes:
                if options != _options(table):
                    yield "an option", owner, None
                self._options[number] = owner, table, table.changes, options
        flat_as_before = without_overrides(self._flat_places.are_of, self._flat)
        for tensor, place in self._other_places if flat_as_before else self._places:
            if place != _place_of(tensor):
                name, owner = self._name_of(tensor)
                yield f"the memory or shape of {name}", owner, tensor

    def _name_of(self, tensor: torch.Tensor) -> tuple[Any, str]:
        """Return a tensor's key in its owner's dict, and the owner's name."""
        return next(
            (key, owner)
            for owner, _, keys, values in self._entries
            for key, value in zip(keys, values, strict=True)
            if value is tensor
        )


def _place_of(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _equal(before: Any, now: Any) -> bool:
    kinds = bool | int | float | str | tuple | list
    return isinstance(before, kinds) and isinstance(now, kinds) and before == now


def _options(table: EmbeddingTable) -> dict[str, Any]:
    """Return the attributes of a table that a lookup may depend on."""
    return {k: v for k, v in vars(table).items() if k[0] != "_" and k not in _NO_OPTIONS}
