"""Lists of tensors that ops take in every step, converted for them only once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from .._overrides import without_overrides

_kept_list = torch.ops.sparsekit.kept_list.default
_detach, _address = torch.Tensor.detach, torch.Tensor.data_ptr


class KeptTensors:
    """Lists of tensors, and what ops on many tables take in their place; see `kept_list.h`.

    Ops get aliases of the tensors: a reference from C++ to a parameter, whose hooks may refer to
    the module that keeps this object, would keep both from being collected. The aliases keep the
    memory, so a tensor that gets other memory has another address.

    Attributes:
        lists: the lists.
        arguments: an argument of the ops for each list.
    """

    def __init__(self, lists: Sequence[Sequence[torch.Tensor]]) -> None:
        self.lists = lists
        self._addresses = without_overrides(_addresses_of, lists)
        self.arguments = without_overrides(_arguments_for, lists)

    def are(self, lists: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Return whether these lists have the same tensors, all of them in the same memory."""
        return same_tensors(self.lists, lists) and self.in_place()

    def in_place(self) -> bool:
        """Return whether all tensors are still in the same memory."""
        return without_overrides(_addresses_of, self.lists) == self._addresses


def _addresses_of(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    return [list(map(_address, tensors)) for tensors in lists]


def _arguments_for(lists: Sequence[Sequence[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[_kept_list(list(map(_detach, tensors)))] if tensors else [] for tensors in lists]


def same_tensors(
    lists: Sequence[Sequence[torch.Tensor]], others: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Return whether all lists have the same tensors."""
    return all(
        len(tensors) == len(of_other) and all(map(is_, tensors, of_other))
        for tensors, of_other in zip(lists, others, strict=True)
    )
