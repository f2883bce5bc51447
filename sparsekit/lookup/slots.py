"""Options that can differ from slot to slot, and their effect on bags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ..errors import check_choice
from ..ops.embedding_bag import COMBINERS
from ..tables.options import check_count
from .inputs import Bags, offsets_of

# Value of max_nnz that allows bags of any length.
NO_LIMIT = 2**63 - 1
# Combiners that layers accept; the ops support all but the last.
POOLINGS = (*COMBINERS, "max")


def each_slot(layer: str, argument: str, value: Any, slot_num: int) -> list[Any] | None:
    """Return the values of an argument given per slot; None if all slots share one value.

    Raises:
        ValueError: the number of values is not slot_num.
    """
    if not isinstance(value, (list, tuple)):
        return None
    if len(value) != slot_num:
        raise ValueError(
            f"{layer}: {argument} must be one for all slots or a list of slot_num={slot_num}, "
            f"got {list(value)!r}"
        )
    return list(value)


def check_max_nnz(
    layer: str, max_nnz: Any, truncate: Any, slot_num: int
) -> int | tuple[int | None, ...] | None:
    """Check and return ``max_nnz``: a tuple if given per slot, otherwise one limit for all slots.

    Raises:
        TypeError, ValueError: max_nnz is neither a positive int nor a list of slot_num such values,
            or truncate is set without max_nnz.
    """
    if not isinstance(truncate, bool):
        raise TypeError(f"{layer}: truncate must be True or False, got {truncate!r}")
    if truncate and max_nnz is None:
        raise ValueError(f"{layer}: truncate=True needs a max_nnz, got None")
    if (each := each_slot(layer, "max_nnz", max_nnz, slot_num)) is None:
        return None if max_nnz is None else check_count(layer, "max_nnz", max_nnz)
    most = [
        None if one is None else check_count(layer, f"max_nnz[{slot}]", one)
        for slot, one in enumerate(each)
    ]
    return tuple(most) if slot_num > 1 else most[0]


def check_combiner(layer: str, combiner: Any, slot_num: int) -> str | tuple[str, ...]:
    """Check and return ``combiner``: one name, or a tuple of names if slots differ.

    Raises:
        ValueError: a combiner is unknown, or the number of combiners is not slot_num.
    """
    if (each := each_slot(layer, "combiner", combiner, slot_num)) is None:
        check_choice(layer, "combiner", combiner, POOLINGS)
        return cast(str, combiner)
    for slot, one in enumerate(each):
        check_choice(layer, f"combiner[{slot}]", one, POOLINGS)
    return tuple(each) if len(set(each)) > 1 else cast(str, each[0])


def within(bags: Bags, layer: str, max_nnz: Sequence[int | None], truncate: bool) -> Bags:
    """Apply each slot's limit to checked bags: truncate longer bags, or raise an error.

    Args:
        bags: checked bags; a sample has a bag for each element of max_nnz.
        layer: name of the layer, for error messages.
        max_nnz: the limit of each slot.
        truncate: whether to cut a longer bag to its first keys instead of raising an error.

    Raises:
        ValueError: a bag has too many keys, and truncate is False.
    """
    begins = cast(torch.Tensor, bags.offsets)
    counts = begins.diff()
    most = torch.tensor([NO_LIMIT if one is None else one for one in max_nnz], device=counts.device)
    samples = len(counts) // len(max_nnz)
    most = most.repeat_interleave(samples) if bags.slot_major else most.repeat(samples)
    beyond = counts > most
    if not beyond.any():
        return bags
    if truncate:
        return taken(bags, begins[:-1], counts.minimum(most))
    b = int(beyond.nonzero()[0])
    slot = b // samples if bags.slot_major else b % len(max_nnz)
    raise ValueError(
        f"{layer}: bag {b} has {int(counts[b])} keys, more than max_nnz[{slot}]={int(most[b])}"
    )


def slot_by_slot(bags: Bags, slots: int) -> Bags:
    """Sort checked bags by slot; they must be sorted by sample."""
    offsets = cast(torch.Tensor, bags.offsets)
    begins, counts = (
        of_bags.view(-1, slots).T.reshape(-1) for of_bags in (offsets[:-1], offsets.diff())
    )
    return replace(taken(bags, begins, counts, len(bags.values)), slot_major=True)


def taken(bags: Bags, begins: torch.Tensor, counts: torch.Tensor, total: int | None = None) -> Bags:
    """Return new bags, each of which is a run of values from existing bags.

    Args:
        bags: the existing bags.
        begins: int64 ``[bags]``, the position in ``bags.values`` where each run begins.
        counts: int64 ``[bags]``, the length of each run.
        total: the sum of counts; None reads the sum from the device, and waits for it.
    """
    offsets = offsets_of(counts)
    total = int(offsets[-1]) if total is None else total
    places = torch.arange(total, device=counts.device)
    places += (begins - offsets[:-1]).repeat_interleave(counts, output_size=total)
    weights = None if bags.weights is None else bags.weights[places]
    return replace(bags, values=bags.values[places], offsets=offsets, weights=weights)
