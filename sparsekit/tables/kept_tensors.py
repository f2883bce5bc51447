"""Lists of tensors that ops take in every step, converted for them only once."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

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
        with torch._C.DisableTorchFunctionSubclass():
            self._addresses = [list(map(_address, tensors)) for tensors in lists]
            self.arguments = [
                [_kept_list(list(map(_detach, tensors)))] if tensors else [] for tensors in lists
            ]

    def are(self, lists: Sequence[Sequence[torch.Tensor]]) -> bool:
        """Return whether these lists have the same tensors, all of them in the same memory."""
        return same_tensors(self.lists, lists) and self.in_place()

    def in_place(self) -> bool:
        """Return whether all tensors are still in the same memory."""
        # For a subclass of Tensor, an access takes three times as long with torch's functions
        # enabled.
        with torch._C.DisableTorchFunctionSubclass():
            return all(
                list(map(_address, tensors)) == addresses
                for tensors, addresses in zip(self.lists, self._addresses, strict=True)
            )


def same_tensors(
    lists: Sequence[Sequence[torch.Tensor]], others: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Return whether all lists have the same tensors."""
    return all(
        len(tensors) == len(of_other) and all(map(is_, tensors, of_other))
        for tensors, of_other in zip(lists, others, strict=True)
    )
