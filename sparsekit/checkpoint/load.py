"""Loads checkpoints, on any number of ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..tables.embedding_table import EmbeddingTable
from .encoding import decoded
from .files import check_sum
from .folder import chain, check_sizes, resolved
from .load_optimizer import OptimizerPlan
from .load_table import TablePlan
from .manifest import DENSE, rank_file
from .snapshot import (
    Optimizers,
    Stateful,
    check_random_state,
    dense_tensors,
    listed,
    named_tables,
    restore_random_state,
    unwrapped,
)
from .table_files import Links, file_in
from .together import Together


@dataclass(frozen=True)
class Loaded:
    """Result of `load`.

    Attributes:
        path: folder of the checkpoint.
        step: the step passed to `save`, or None.
        missing: names that are in the module but not in the checkpoint; empty if strict.
        unexpected: names that are in the checkpoint but not in the module; empty if strict.
    """

    path: Path
    step: int | None
    missing: list[str]
    unexpected: list[str]


def load(
    module: torch.nn.Module,
    path: str | os.PathLike[str],
    optimizer: Optimizers = None,
    *,
    state: Mapping[str, Stateful] | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Load a checkpoint written by `save`, on any number of ranks.

    A table may differ from the saved one in its placement, in its capacity if the rows fit, and in
    whether it uses a hash table. Each rank reads the rows that it owns, piece by piece. Everything
    is checked first, and the objects in ``state`` load their states before the module does: the
    module is unchanged if something does not fit, if a file is damaged, or if an object refuses its
    state. Loading temporarily needs 21 bytes of memory per row of a hash table's capacity.

    With the same number of ranks and identically constructed tables, keys keep their rows and
    torch's random numbers continue, so training on the CPU is bitwise identical to a run without
    the interruption. With several ranks, this is a collective.

    Args:
        module: constructed like the module that was saved.
        path: a checkpoint, or a folder whose latest whole checkpoint is loaded.
        optimizer: the optimizer or optimizers, of the same classes and with the same parameters as
            the saved ones. Their settings, such as learning rates, are loaded, too. If None, only
            the module is loaded.
        state: objects that load the states saved under their names in this dict. If the number of
            ranks has changed, all ranks load rank 0's states.
        strict: whether the names of tables and tensors in the module and in the checkpoint must be
            the same.
        cast: whether to convert vectors and dense tensors to the module's dtype if theirs differs.
        verify: whether to verify the checksums of all files first. If False, damaged values may be
            loaded.
        process_group: as for `save`.

    Raises:
        CheckpointError: (on all ranks) a file is missing or damaged; a table is missing, is
            unexpected, differs in dim or dtype, or has too many rows; or the optimizers do not
            match.
        ValueError: a table is distributed over a different set of ranks than process_group.
    """
    module = unwrapped(module)
    together = Together(module, process_group)
    what = f"load {path}"
    found = Path(together.text_of_first(what, lambda: os.fspath(resolved(path))))
    links = together.do(what, lambda: chain(found))
    newest = links[-1][1]

    def check() -> Plan:
        for folder, manifest in links if verify else ():
            check_sizes(folder, manifest)
            # Each rank verifies a share of the files.
            for name in sorted(manifest.files)[together.rank :: together.world_size]:
                check_sum(folder / name, manifest.files[name])
        return Plan(module, together, links, listed(optimizer), state or {}, strict, cast)

    plan = together.do(what, check)
    together.do(what, plan.hand_out)
    together.do(what, plan.carry_out)
    return Loaded(found, newest.step, plan.missing, plan.unexpected)


class Plan:
    """Checks that a checkpoint fits a module; `hand_out` and `carry_out` then load it."""

    def __init__(
        self,
        module: torch.nn.Module,
        together: Together,
        links: Links,
        optimizers: Sequence[torch.optim.Optimizer],
        state: Mapping[str, Stateful],
        strict: bool,
        cast: bool,
    ) -> None:
        self._folder, self._manifest = links[-1]
        self._state = state
        layers = named_tables(module)
        for layer in layers.values():
            layer.refuse_meta()
        with file_in(self._folder, DENSE) as file:
            dense = {name: file.read(name) for name in file.places}
        saved = {name[len("module.") :] for name in dense if name.startswith("module.")}
        mine = {*layers, *dense_tensors(module)}
        theirs = {*self._manifest.tables, *saved}
        self.missing, self.unexpected = sorted(mine - theirs), sorted(theirs - mine)
        if strict and (self.missing or self.unexpected):
            raise CheckpointError(
                f"{self._folder}: does not fit the module: "
                f"{_some('it lacks', self.missing)}{_some('it has besides', self.unexpected)}"
                f"pass strict=False to load what both have"
            )
        self._tables = [
            TablePlan(name, layer, links, cast)
            for name, layer in layers.items()
            if name in self._manifest.tables
        ]
        self._dense = self._match_dense(dense_tensors(module), dense, cast)
        self._optimizers = self._match_optimizers(module, layers, optimizers, dense)
        own = self._rank_state(together)
        unknown = sorted(state.keys() - own["state"].keys())
        if unknown and strict:
            raise CheckpointError(
                f"{self._folder}: has no state of {', '.join(unknown)}, but of "
                f"{', '.join(own['state']) or 'nothing'}"
            )
        self._own = own

    def _match_dense(
        self, mine: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor], cast: bool
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        pairs = []
        for name, tensor in mine.items():
            value = saved.get(f"module.{name}")
            if value is None:
                continue
            if value.shape != tensor.shape:
                raise CheckpointError(
                    f"{self._folder}: {name} has shape {list(value.shape)}, and "
                    f"{list(tensor.shape)} in the module"
                )
            if value.dtype != tensor.dtype and not cast:
                raise CheckpointError(
                    f"{self._folder}: {name} is {value.dtype}, and {tensor.dtype} in the module; "
                    f"pass cast=True to round it"
                )
            pairs.append((tensor, value))
        return pairs

    def _match_optimizers(
        self,
        module: torch.nn.Module,
        layers: Mapping[str, EmbeddingTable],
        optimizers: Sequence[torch.optim.Optimizer],
        tensors: Mapping[str, torch.Tensor],
    ) -> list[OptimizerPlan]:
        saved = self._manifest.optimizers
        if optimizers and len(optimizers) != len(saved):
            raise CheckpointError(
                f"{self._folder}: has the state of {len(saved)} optimizers, and {len(optimizers)} "
                f"were given"
            )
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        loaded: dict[torch.Tensor, TablePlan] = {plan.layer.weight: plan for plan in self._tables}
        try:
            return [
                OptimizerPlan(
                    self._folder, number, optimizer, saved[number], names, tensors, loaded
                )
                for number, optimizer in enumerate(optimizers)
            ]
        except CheckpointError as error:
            raise self._named("optimizers", error) from None
        except (
            ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError
        ) as error:  # fmt: skip
            raise CheckpointError(
                f"{self._folder}: is damaged: optimizers: {error!r:.200}"
            ) from error

    def _named(self, what: str, error: CheckpointError) -> CheckpointError:
        """Return the error with the checkpoint's path and ``what`` prepended to its message."""
        text = str(error)
        known = text.startswith(str(self._folder))
        return error if known else CheckpointError(f"{self._folder}: {what}: {text}")

    def _rank_state(self, together: Together) -> dict[str, Any]:
        """Return this rank's own saved state, or rank 0's if the number of ranks differs."""
        self._same_ranks = self._manifest.world_size == together.world_size
        number = together.rank if self._same_ranks else 0
        with file_in(self._folder, rank_file(number)) as file:
            tensors = {name: file.read(name) for name in file.places}
        try:
            values = decoded(self._manifest.ranks[number], tensors)
        except CheckpointError as error:
            raise self._named(f"ranks[{number}]", error) from None
        values = values if isinstance(values, dict) else {}
        if not isinstance(values.get("state"), dict) or not isinstance(values.get("random"), dict):
            raise CheckpointError(f"{self._folder}: ranks[{number}] lacks state or random")
        if not all(isinstance(name, str) for name in values["state"]):
            raise CheckpointError(f"{self._folder}: ranks[{number}].state has what is no name")
        try:
            check_random_state(values["random"])
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._folder}: ranks[{number}].random is damaged: {error!s:.200}"
            ) from None
        return cast(dict[str, Any], values)

    def hand_out(self) -> None:
        """Load the states of the objects passed as ``state``; any of them may raise an error."""
        for name, each in self._state.items():
            if name in self._own["state"]:
                each.load_state_dict(self._own["state"][name])

    @torch.no_grad()
    def carry_out(self) -> None:
        """Load the tensors, tables and optimizers."""
        for tensor, value in self._dense:
            tensor.copy_(value)
        for table in self._tables:
            table.layer.catch_up()  # apply overdue steps now, before rows are loaded
        for optimizer in self._optimizers:
            optimizer.load()
        for table in self._tables:
            table.load()
        if self._same_ranks:
            restore_random_state(self._own["random"])


def _some(what: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{what} {', '.join(names[:5])}{more}; "
