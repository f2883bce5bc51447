"""Drops padding, truncates bags and sorts them by slot on a device, without waiting for it.

A lookup on the CPU checks bags and drops keys before it calls an op. On a device, the host knows
neither the offsets nor the number of keys that remain. Keys are therefore moved instead of dropped:
the keys to drop are put last, in an extra bag that is not pooled. Bags that must be refused get an
invalid first offset, which the op reports like any other invalid offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from .inputs import Bags, offsets_of

_NO_LIMIT = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Changes:
    """Changes that a layer makes to its bags.

    Attributes:
        slots: number of slots in each sample.
        padding: for each slot, the key that is dropped; None for no key.
        max_nnz: for each slot, the limit on a bag's keys, padding included; None for no limit.
        max_feature_num: limit on the number of keys in each sample, padding included.
        limits: for each slot, the limit on a bag's keys without padding; None for no limit.
        truncate: whether a bag with more keys than its slot's limit is cut to its first keys;
            otherwise the bags are refused.
        by_slot: whether bags must be sorted by slot.
    """

    slots: int
    padding: Sequence[int | None] = ()
    max_nnz: Sequence[int | None] = ()
    max_feature_num: int | None = None
    limits: Sequence[int | None] = ()
    truncate: bool = False
    by_slot: bool = False


def changed(bags: Bags, changes: Changes) -> Bags:
    """Return the bags with these changes, followed by the extra bag.

    Args:
        bags: the bags, with all tensors on a device; offsets may have invalid values.
        changes: the changes.
    """
    n, count = len(bags.values), bags.count
    places = torch.arange(n + 1, device=bags.values.device)
    given = places if bags.offsets is None else bags.offsets.to(torch.int64)
    end = given.new_full((1,), n)
    if n == 0 or count == 0:
        # There are no keys to move. If the offsets do not end at n, append n + 1 instead of n, so
        # that the op refuses the bags.
        return Bags(bags.values, torch.cat([given, end + (given[-1:] != n)]), bags.weights)
    of_bags = _Limits(given, n, bags.slot_major, changes)
    # Clamp the offsets, so that invalid ones cannot address memory out of bounds.
    offsets = given.clamp(0, n)
    order = None
    keep = None
    if changes.padding:
        keep = of_bags.are_keys(bags.values, offsets, places[:-1])
    if changes.limits:
        kept_before = places if keep is None else offsets_of(keep.to(torch.int64))
        bag = bag_of(offsets, places[:-1])
        within = kept_before[:-1] - kept_before[offsets[bag]] < of_bags.most[bag]
        of_bags.refuse_beyond(kept_before[offsets])
        keep = within if keep is None else keep & within
    if keep is not None:
        order, offsets = _dropped_last(keep, offsets, places)
    if changes.by_slot and not bags.slot_major:
        of_slots, offsets = _slot_by_slot(offsets, changes.slots, places)
        order = of_slots if order is None else order[of_slots]
    offsets = torch.cat([offsets, end])
    offsets[:1].masked_fill_(of_bags.refused, -1)
    values, weights = bags.values, bags.weights
    if order is not None:
        values, weights = values[order], None if weights is None else weights[order]
    return Bags(values, offsets, weights, bags.slot_major or changes.by_slot)


def key_by_key(keys: int, offsets: torch.Tensor) -> torch.Tensor:
    """Return offsets for the result of `changed`: a bag for each key, then the extra bag.

    Args:
        keys: number of keys, including the keys in the extra bag, whose own bags are empty.
        offsets: offsets of the changed bags. Invalid ones give invalid offsets.
    """
    places = torch.arange(1, keys + 1, device=offsets.device)
    return torch.cat([offsets[:1], places.minimum(offsets[-2:-1]), offsets[-1:]])


def one_each(bags: Bags, changes: Changes) -> tuple[Bags, torch.Tensor]:
    """Return the `changed` bags with one key each, and the original bags' offsets.

    The limits apply to the original bags. A padding key becomes an empty bag.
    """
    n = len(bags.values)
    places = torch.arange(n + 1, device=bags.values.device)
    given = places if bags.offsets is None else bags.offsets.to(torch.int64)
    each = changed(Bags(bags.values, None, None), Changes(1, changes.padding))
    refused = _Limits(given, n, False, changes).refused
    cast(torch.Tensor, each.offsets)[:1].masked_fill_(refused, -1)
    return each, given


class _Limits:
    """Checks bags against their limits; the offsets `given` should rise from 0 to n.

    Attributes:
        refused: bool ``[]``, whether the bags must be refused.
        most: the limit of each bag, without padding.
    """

    def __init__(self, given: torch.Tensor, n: int, slot_major: bool, changes: Changes) -> None:
        self._changes = changes
        self._slot_major = slot_major
        self._counts = counts = given.diff()
        samples = len(counts) // changes.slots
        self.refused = (given[0] != 0) | (given[-1] != n) | (counts < 0).any()
        if changes.max_nnz:
            self.refused |= (counts > self._of_bags(changes.max_nnz, _NO_LIMIT)).any()
        if changes.max_feature_num is not None:
            shape = (changes.slots, samples) if slot_major else (samples, changes.slots)
            of_samples = counts.view(shape).sum(0 if slot_major else 1)
            self.refused |= (of_samples > changes.max_feature_num).any()
        if changes.limits:
            self.most = self._of_bags(changes.limits, _NO_LIMIT)

    def are_keys(
        self, values: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor
    ) -> torch.Tensor:
        """Return a mask of the values that are not padding."""
        padding = self._changes.padding
        keys = values.to(torch.int64)
        if len(set(padding)) == 1:
            return keys != cast(int, padding[0])
        bag = bag_of(offsets, places)
        none = self._of_bags([int(key is None) for key in padding], 0)[bag] == 1
        return none | (keys != self._of_bags(padding, 0)[bag])

    def _of_bags(self, of_slots: Sequence[int | None], none: int) -> torch.Tensor:
        """Expand one number per slot to one per bag, with `none` in place of None."""
        numbers = [none if number is None else number for number in of_slots]
        if len(set(numbers)) == 1:
            return self._counts.new_full(self._counts.shape, numbers[0])
        # Fill tensors with kernels: a tensor made from the list would be copied from the host.
        samples = len(self._counts) // len(numbers)
        each = torch.stack([self._counts.new_full((samples,), number) for number in numbers])
        return (each if self._slot_major else each.T).reshape(-1)

    def refuse_beyond(self, offsets: torch.Tensor) -> None:
        """Refuse all bags if these offsets give any bag more keys than its slot allows."""
        if not self._changes.truncate:
            self.refused |= (offsets.diff() > self.most).any()


def bag_of(offsets: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return the bag that contains each position; an arbitrary bag if offsets are invalid."""
    return torch.searchsorted(offsets[1:], places, right=True).clamp(max=len(offsets) - 2)


def _dropped_last(
    keep: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that puts all kept keys first, and the offsets of the kept keys' bags."""
    kept_before = offsets_of(keep.to(torch.int64))
    before, total = kept_before[:-1], kept_before[-1]
    target = torch.where(keep, before, total + places[:-1] - before)
    return torch.empty_like(target).scatter_(0, target, places[:-1]), kept_before[offsets]


def _slot_by_slot(
    offsets: torch.Tensor, slots: int, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order that sorts bags by slot, and the sorted bags' offsets.

    Keys after the last bag do not move.
    """
    begins, counts = (x.view(-1, slots).T.reshape(-1) for x in (offsets[:-1], offsets.diff()))
    sorted_offsets = offsets_of(counts)
    place = places[:-1]
    bag = bag_of(sorted_offsets, place)
    moved = begins[bag] + place - sorted_offsets[bag]
    order = torch.where(place < sorted_offsets[-1], moved, place)
    return order.clamp(0, len(place) - 1), sorted_offsets
