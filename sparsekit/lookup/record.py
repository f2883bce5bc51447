"""Computes the gradients of rows in backward, from the record of a lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .. import ops
from .._overrides import without_overrides
from .._pybind import each_is
from ..ops._group import FeatureColumn, split_by_table
from ..tables.in_flight import InFlight
from ..tables.weight import Update, deliver_gradients, key_changes, update_of_all
from .numbered import numbered
from .plan import TableBatch
from .second import Gradients, pooled_again

# Ops without their Python wrappers, since the results of a lookup need no checks.
_backward = torch.ops.sparsekit.group_embedding_bag_backward.default
_pool = torch.ops.sparsekit.group_embedding_bag_.default


class LookupResult(NamedTuple):
    """Outputs of a lookup, and everything that its backward pass needs.

    Attributes:
        outputs: one output for each request, or a single output with the columns of all requests.
        record: the record of the lookup, without the tensors that autograd must track.
        found: the tensors that autograd must track, for ``save_for_backward``.
    """

    outputs: list[torch.Tensor]
    record: LookupRecord
    found: list[torch.Tensor | None]


@dataclass(slots=True)
class LookupRecord:
    """Everything needed for the backward pass of a lookup in this rank's tables.

    Attributes:
        calls: for each of `LookupPlan.batches`, the record of its call to the ops.
        weights: weights of the distinct tables.
        autograd_inputs: tensors that autograd passes gradients to: the weights, or only one of them
            if `fused`. A single input saves time, and is enough, since gradients that an
            optimizer applies in backward do not pass through autograd.
        fused: whether one optimizer applies all gradients in backward.
        key_changes: the value of `tables.weight.key_changes` at the time of the lookup.
    """

    calls: tuple[CallRecord, ...]
    weights: list[torch.Tensor]
    autograd_inputs: list[torch.Tensor]
    fused: bool
    key_changes: int

    def gradients(
        self, grads: Sequence[torch.Tensor | None], found: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the sparse gradient of each autograd input; None if not needed or already applied.

        Args:
            grads: gradients of the outputs; None for an output without a gradient.
            found: see `LookupResult`.
        """
        calls = len(self.calls)
        return self._gradients([grads] * calls, found, [None] * calls)

    def gradients_at(
        self,
        grads: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor | None],
        features: Sequence[torch.Tensor],
    ) -> list[torch.Tensor | None]:
        """Return the result of `gradients` for a lookup made by `table_ops.run_into`.

        Args:
            grads: gradients of the tensors that the lookup wrote to.
            found: see `LookupResult`.
            features: the `Descriptors.features` of the lookup, except that ``begin`` locates each
                gradient in `grads` instead of an output.
        """
        return self._gradients([[grad] for grad in grads], found, features)

    def pooled_again(
        self, of_gradients: Gradients, grads: Gradients, found: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients for the outputs' gradients; see `second.pooled_again`."""
        for call in self.calls:
            for lookup in call.in_flight:
                lookup.check_again()
        return pooled_again(self.calls, of_gradients, grads, found)

    def _gradients(
        self,
        grads: Sequence[Sequence[torch.Tensor | None]],
        found: Sequence[torch.Tensor | None],
        features: Sequence[torch.Tensor | None],
    ) -> list[torch.Tensor | None]:
        if self.key_changes != key_changes.count:
            self._check_keys()
        in_flight = [rows for call in self.calls for rows in call.in_flight]
        for rows in in_flight:
            rows.check()
        gradients: list[torch.Tensor | None] = []
        each = len(found) // len(self.calls)
        for k, call in enumerate(self.calls):
            own = call.current(found[k * each : (k + 1) * each])
            gradients += call.gradients(grads[k], own, features[k])
        for rows in in_flight:
            rows.done = True
        if not self.fused:
            return gradients
        # Gradients remain only if the optimizer has been detached since the lookup.
        left = [(w, g) for w, g in zip(self.weights, gradients, strict=True) if g is not None]
        if left:
            torch.autograd.backward([w for w, _ in left], [g for _, g in left])
        return [None]

    def _check_keys(self) -> None:
        """Raise RuntimeError if any rows have been given different keys since the lookup."""
        names = [name for call in self.calls for name in call.batch.names]
        for name, weight in zip(names, self.weights, strict=True):
            if getattr(weight, "keys_changed_at", 0) > self.key_changes:
                raise RuntimeError(
                    f"{name}: its rows have other keys than in the forward of this backward: keys "
                    f"have been erased, or the table was reset or loaded. Run each backward before "
                    f"that"
                )


@dataclass(slots=True)
class CallRecord:
    """Everything that backward needs for one call to the ops; see `Descriptors`."""

    batch: TableBatch
    weights: list[torch.Tensor]
    sample_weights: list[torch.Tensor]
    features: torch.Tensor
    width: int | None
    # Rows that may be renumbered before backward, since their tables have scores.
    in_flight: tuple[InFlight, ...] = ()

    def current(self, found: Sequence[Any]) -> Sequence[Any]:
        """Return the lookup's results, with current row numbers."""
        for lookup in self.in_flight:
            if lookup.moved:
                return [*lookup.found, *found[2:]]
        return found

    def gradients(
        self,
        grads: Sequence[torch.Tensor | None],
        found: Sequence[Any],
        features: torch.Tensor | None,
    ) -> list[torch.Tensor | None]:
        """Return the sparse gradient of each weight; see `LookupRecord.gradients`."""
        features = self.features if features is None else features
        index, rows, counts, bags, key_starts = found
        if self.width is None:
            grads = [grads[i] for i in self.batch.positions]
        if rows is None:
            index, rows, counts = numbered(
                index, entries_of_tables(bags, self.features, len(self.weights))
            )
        taken = self._taken(grads)
        if not taken:
            return [None] * len(self.weights)
        dims = self.batch.dims
        if len(taken) < len(dims):
            wanted = set(taken)  # other tables get gradients of length 0
            dims = [dim if t in wanted else 0 for t, dim in enumerate(dims)]
        given = grads_or_zeros(self.batch, grads, dims, features, self.weights[0])
        asked_of = index, rows, counts, bags, features, self.sample_weights, key_starts

        def updates() -> list[Update]:
            sorted_rows, sums, num_rows = _backward(
                given,
                dims,
                *asked_of,
                self.batch.divisor,
                torch.are_deterministic_algorithms_enabled(),
            )
            # Gradients of sums may have a wider dtype than the rows.
            sums = sums.to(self.weights[0].dtype)
            parts = split_by_table(dims, num_rows.tolist(), sorted_rows, sums)
            return [(self.weights[t], parts[0][t], parts[1][t]) for t in taken]

        def update(*lists: Any, **options: Any) -> None:
            deterministic = torch.are_deterministic_algorithms_enabled()
            options |= {"divisor": self.batch.divisor, "deterministic": deterministic}
            ops.group_embedding_bag_update_(given, *asked_of, *lists, **options)

        everything = len(taken) == len(self.weights)
        # Pass the same list as in the previous step, so that the optimizer recognizes it.
        taking = self.weights if everything else [self.weights[t] for t in taken]
        if (in_backward := update_of_all(taking)) is not None:
            everything = everything and given[0].dtype == self.weights[0].dtype
            in_backward(taking, updates, update if everything else None)
            return [None] * len(self.weights)
        delivered: list[torch.Tensor | None] = [None] * len(self.weights)
        shards_of = [self.batch.shards_of[t] for t in taken]
        for t, gradient in zip(taken, deliver_gradients(updates(), shards_of), strict=True):
            delivered[t] = gradient
        return delivered

    def _taken(self, grads: Sequence[torch.Tensor | None]) -> Sequence[int]:
        """Return the tables whose weights get a gradient."""
        taken: Sequence[int]
        if len(self.weights) == 1:  # this branch may be compiled
            taken = [0] if self.weights[0].requires_grad else []
        elif without_overrides(each_is, self.weights, "requires_grad", True):
            taken = range(len(self.weights))
        else:
            taken = [t for t, weight in enumerate(self.weights) if weight.requires_grad]
        if self.width is not None:
            return taken if grads[0] is not None else []
        if any(grad is None for grad in grads):
            each = zip(self.batch.table_of_request, grads, strict=True)
            asked = {t for t, grad in each if grad is not None}
            taken = [t for t in taken if t in asked]
        return taken

    @property
    def shards_of(self) -> list[str | None]:
        """For each table: its name if it is sharded over ranks, else None."""
        return self.batch.shards_of

    def pool_again(
        self,
        vectors: Gradients,
        grads: Gradients,
        found: Sequence[Any],
        outs: list[torch.Tensor | None],
    ) -> None:
        """Pool these vectors as the lookup pooled its rows, and add the results to `outs`."""
        positions = self.batch.positions if self.width is None else [0]
        own_grads = [grads[i] for i in positions]
        given = grads_or_zeros(
            self.batch, own_grads, self.batch.dims, self.features, self.weights[0]
        )
        index, rows, counts, bags, key_starts = found
        tables = [
            torch.zeros_like(weight) if own is None else own.to_dense().contiguous()
            for weight, own in zip(self.weights, vectors, strict=True)
        ]
        own_outs = [torch.zeros_like(grad) for grad in given]
        results = index, rows, counts, bags, self.features
        with torch._C._AutoDispatchBelowAutograd():
            _pool(own_outs, tables, *results, self.sample_weights, key_starts, [], [], None)
        for i, out in zip(positions, own_outs, strict=True):
            before = outs[i]
            outs[i] = out if before is None else before + out


def entries_of_tables(bags: torch.Tensor, features: torch.Tensor, tables: int) -> list[slice]:
    """Return the range of entries for each table."""
    last = features.new_zeros(tables + 1)
    column = features.T
    last[1:].index_add_(0, column[FeatureColumn.table], column[FeatureColumn.bags])
    ends = bags[last.cumsum(0).to(bags.device)].tolist()
    return list(map(slice, ends, ends[1:]))


def grads_or_zeros(
    batch: TableBatch,
    grads: Sequence[torch.Tensor | None],
    dims: Sequence[int],
    features: torch.Tensor,
    like: torch.Tensor,
) -> list[torch.Tensor]:
    """Return the gradients of all requests to these tables, with zeros instead of None.

    With several ranks, all gradients may be None on one rank. That rank must still take part in
    exchanging gradients; its zeros have the dtype and device of `like`.
    """
    given = [grad for grad in grads if grad is not None]
    if len(given) == len(grads):
        return given
    bags = features.new_zeros(len(grads))
    column = features.T
    bags.index_add_(0, column[FeatureColumn.tensor], column[FeatureColumn.bags])
    each = zip(grads, bags.tolist(), batch.table_of_request, strict=True)
    like = given[0] if given else like
    return [like.new_zeros(n * dims[t]) if g is None else g for g, n, t in each]
