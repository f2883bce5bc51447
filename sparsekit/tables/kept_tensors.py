"""Lists of tensors that ops take in every step, converted only once."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .._overrides import without_overrides
from .._pybind import TensorPlaces, lists_are

_kept_list = torch.ops.sparsekit.kept_list.default

_in_use: weakref.WeakSet[KeptTensors] = weakref.WeakSet()


class Tensors(NamedTuple):
    """Lists of tables' tensors or of arguments made from them; the last 3 are for hash tables."""

    weights: list[torch.Tensor]
    seeds: list[torch.Tensor]
    buckets: list[torch.Tensor]
    hash_seeds: list[torch.Tensor]
    sizes: list[torch.Tensor]


# The tensors of a hash table, in the order of `Tensors`.
OF_HASH_TABLE = ["buckets", "hash_seed", "size"]


class KeptTensors:
    """Lists of tensors, and the arguments that ops on many tables take instead; see `kept_list.h`.

    Plain tensors are passed to ops as they are, and ops notice changes to their memory. Parameters
    are replaced by aliases: a parameter's hooks may refer to the module that keeps this object, so
    a reference from C++ to the parameter would keep both from being collected. Aliases keep the
    memory alive, so a parameter that gets new memory has a new address.

    Attributes:
        lists: the lists.
        arguments: the ops' argument for each list.
        aliases: the alias of each parameter, in the order of the lists.
    """

    def __init__(self, lists: Sequence[list[torch.Tensor]]) -> None:
        self.lists = lists
        self.aliases: list[torch.Tensor] = []
        self._aliased = [one for tensors in lists for one in tensors if not _is_plain(one)]
        self._places = without_overrides(TensorPlaces, self._aliased)
        self.arguments = without_overrides(self._arguments)
        _in_use.add(self)

    def _arguments(self) -> list[list[torch.Tensor]]:
        arguments = []
        for tensors in self.lists:
            given = [one if _is_plain(one) else one.detach() for one in tensors]
            pairs = zip(given, tensors, strict=True)
            self.aliases += [alias for alias, one in pairs if alias is not one]
            arguments.append([_kept_list(given)] if given else [])
        return arguments

    def are(self, lists: Sequence[list[torch.Tensor]]) -> bool:
        """Return whether `lists` contain the same tensors as `self.lists`, and `in_place` holds."""
        return all(map(lists_are, self.lists, lists)) and self.in_place()

    def in_place(self) -> bool:
        """Return whether `arguments` still refer to the tensors."""
        return bool(self.arguments) and without_overrides(self._places.are_of, self._aliased)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) is torch.Tensor and not tensor.requires_grad


def release_kept() -> None:
    """Drop all references from C++ to tensors; the next steps create new ones.

    While C++ refers to a tensor, torch refuses to swap it with another one, and `load_state_dict`
    must swap tensors if an option in `torch.__future__` is set.
    """
    for kept in list(_in_use):
        kept.arguments = []
