"""Captures a training step in a CUDA graph, and replays it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from .._reports import DEFERRING_DEVICES, Reports, reports_of
from ..errors import check_int
from ..optim.row_optimizer import RowOptimizer
from ..tables.embedding_table import EmbeddingTable
from ..tables.reports import Report, captured_reports, raise_errors
from ..tables.weight import count_own_writes, update_of
from .conditions import Conditions

T = TypeVar("T")


class Graph:
    """A CUDA graph and the stream used to capture it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def warm_up(self, run: Callable[[], T]) -> T:
        """Run a function on the capture stream, ordered as if it ran on the current stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        return result

    def capture(self, run: Callable[[], T]) -> T:
        """Capture the kernels that a function launches; they do not run."""
        self._graph = torch.cuda.CUDAGraph()
        # Let other threads, such as data loaders, allocate memory during the capture.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode=mode):
            return run()

    def replay(self) -> None:
        """Run the captured kernels on the current stream."""
        with torch.cuda.device(self._device):
            self._graph.replay()


class CapturedStep:
    """A training step that is captured in a CUDA graph, and called like the step itself.

    The first `warm_ups` calls run the step normally, on a separate stream. The next call captures
    the step. That call and all later ones replay the capture, so the host launches one graph
    instead of many kernels. Each call runs one step on its own inputs, and gives the same bits as
    without a capture.

    The step runs forward, backward and the optimizers' ``step()``, zeroes gradients, and returns
    tensors, or dicts, lists or tuples of them, which the next call overwrites. It must not wait for
    the device: all tables must be updated through `fuse_in_backward`, and not by an exact `Adam`.
    To follow a schedule, make the optimizers' ``lr`` a tensor on the device, and call
    ``scheduler.step()`` after the captured step, not in it. Dense optimizers need
    ``capturable=True``.

    Like a lookup, a replay waits for its result if its new keys might not fit. A table with
    on_full="grow" grows before such a replay, and the step is captured again. Other errors, such
    as an invalid key, are raised by a call at most 8 lookups or replays later, by `raise_errors`,
    or when a checkpoint is saved. If keys do not fit, the step runs without them before the error
    is raised.

    Args:
        step: the step; its arguments are tensors, or dicts, lists or tuples of them.
        model: the module that the step trains, on a CUDA device.
        optimizers: all optimizers that the step calls, or the optimizer if it calls just one.
        warm_ups: number of calls before the capture, at least 1.

    Raises:
        TypeError: warm_ups is not an int.
        ValueError: the model is not on one CUDA device, its tables are sharded over ranks or have
            scores, or warm_ups is less than 1; (in a call) a table is not updated in backward, or
            its optimizer is not in `optimizers`; or inputs differ from the first call's in
            structure, shape, dtype or, if they are not tensors, value.
        RuntimeError: (in a call) the step cannot be captured; or something that is part of the
            capture has changed since: a parameter, buffer or state is another tensor, a layer or
            the model is in another mode or has other options, an optimizer setting has
            another value, an optimizer has been detached, or `sparsekit.checked` is on. In-place
            changes, such as those by a model's ``load_state_dict``, are allowed.
        IndexError, TableFullError: (in a call) an error from an earlier lookup or replay, or from
            this one.

    Example:
        >>> def step(keys, labels):
        ...     optimizer.zero_grad()
        ...     loss = loss_fn(model(keys), labels)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> captured = sparsekit.train.CapturedStep(step, model, optimizer)
        >>> for keys, labels in batches:
        ...     loss = captured(keys, labels)
        ...     scheduler.step()
    """

    def __init__(
        self,
        step: Callable[..., Any],
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
        *,
        warm_ups: int = 3,
    ) -> None:
        self._optimizers: list[torch.optim.Optimizer] = (
            [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else [*optimizers]
        )
        self._warm_ups = check_int("CapturedStep", "warm_ups", warm_ups, 1, 2**62)
        self._step, self._modules = step, list(model.named_modules())
        self._tables = [m for _, m in self._modules if isinstance(m, EmbeddingTable)]
        self._parameters = list(model.parameters())
        devices = {tensor.device for tensor in [*self._parameters, *model.buffers()]}
        self._device = next(iter(devices), torch.device("cpu"))
        if len(devices) != 1 or self._device.type not in DEFERRING_DEVICES:
            listed = ", ".join(sorted(map(str, devices))) or "none"
            raise ValueError(f"CapturedStep: the model must be on one CUDA device, got {listed}")
        for table in self._tables:
            if table.world_size > 1:
                raise ValueError(
                    f"CapturedStep: {table.name} is sharded over {table.world_size} ranks, whose "
                    f"messages have other lengths in each step; capture steps of one rank only"
                )
            if table.life is not None:
                raise ValueError(
                    f"CapturedStep: {table.name} has scores, and the host decides before each step "
                    f"whether rows must be dropped, which a graph cannot do; make it with "
                    f"on_full='error' and without score, ttl and admission"
                )
        self._graph = Graph(self._device)
        self._inputs: list[Any] = []  # copies of the inputs' leaves; the graph reads them
        self._structure: Any = None
        self._outputs: Any = None
        self._reports: list[Report] = []
        self._written: list[torch.Tensor] = []  # parameters that the step changes
        self._conditions: Conditions | None = None  # set by the capture

    def __call__(self, *inputs: Any) -> Any:
        """Run a step on these inputs, and return its outputs, detached."""
        leaves, structure = tree_flatten(inputs)
        if self._structure is None:
            self._inputs, self._structure = [self._like(leaf) for leaf in leaves], structure
        self._check_inputs(leaves, structure)
        reports = self._deferring() if self._warm_ups == 0 else None
        if self._conditions is not None:
            self._check_conditions(self._conditions)
        self._copy_inputs(leaves)
        if reports is None:
            outputs = _detached(self._graph.warm_up(self._run))
            self._warm_ups -= 1
            return outputs
        while self._conditions is None or self._grow():
            self._capture()
        self._replay(reports)
        return self._outputs

    def _run(self) -> Any:
        return self._step(*tree_unflatten(self._inputs, self._structure))

    def _like(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=self._device)

    def _check_inputs(self, leaves: Sequence[Any], structure: Any) -> None:
        if structure != self._structure:
            raise ValueError(
                f"CapturedStep: inputs must have the structure of the first call, "
                f"{self._structure}, got {structure}"
            )
        for number, (own, leaf) in enumerate(zip(self._inputs, leaves, strict=True)):
            if not _alike(own, leaf):
                raise ValueError(
                    f"CapturedStep: input {number} must be {_form(own)}, as in the first call, got "
                    f"{_form(leaf)}; drop a smaller last batch, or make a step for each form"
                )

    @torch.no_grad()
    def _copy_inputs(self, leaves: Sequence[Any]) -> None:
        # A launch for each of hundreds of inputs would cost as much as the step. Inputs with the
        # same dtype and device can be copied together.
        alike: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for own, leaf in zip(self._inputs, leaves, strict=True):
            if isinstance(own, torch.Tensor):
                targets, sources = alike.setdefault((leaf.dtype, leaf.device), ([], []))
                targets.append(own)
                sources.append(leaf)
        for targets, sources in alike.values():
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def _deferring(self) -> Reports:
        """Return the device's reports; raise RuntimeError if `sparsekit.checked` is on."""
        reports = reports_of(self._device)
        if reports is None:
            raise RuntimeError(
                "CapturedStep: with sparsekit.checked on, every op waits for the device, which a "
                "graph cannot do; turn it off"
            )
        return reports

    def _capture(self) -> None:
        """Capture the step; its kernels run only in replays."""
        for table in self._tables:
            self._check_table(table)
        # Read all reports of earlier lookups now, because lookups must not do so in the capture.
        raise_errors(self._device)
        versions = [parameter._version for parameter in self._parameters]
        try:
            with captured_reports() as self._reports:
                outputs = self._graph.capture(self._run)
        except Exception as error:
            for optimizer in self._optimizers:
                if isinstance(optimizer, RowOptimizer):
                    optimizer.forget_updates()  # the updates' kernels have not run
            raise RuntimeError(
                "CapturedStep: the step cannot be captured, since it waits for the device or "
                "fails; the errors above say where"
            ) from error
        changed = map(operator.ne, versions, (p._version for p in self._parameters))
        self._written = [p for p, differs in zip(self._parameters, changed, strict=True) if differs]
        self._outputs = _detached(outputs)
        self._conditions = Conditions(self._modules, self._optimizers)

    def _grow(self) -> bool:
        """Make room in tables that grow; return whether one grew, which outdates the graph.

        While there is room, the call does not wait for the device.
        """
        indices = {id(x.table.row_bound): x.table for x in self._tables if x.table and x.grows}
        each = [one for report in self._reports for one in report.asked()] if indices else []
        grown = [indices[id(x)].make_room_for(keys) for x, keys in each if id(x) in indices]
        return any(grown)

    def _check_table(self, table: EmbeddingTable) -> None:
        """Raise ValueError if a step on this table would wait for the device."""
        weight = table.weight
        if not (table.training and weight.requires_grad):
            return
        update = update_of(weight)
        if update is None:
            raise ValueError(
                f"CapturedStep: {table.name} has a gradient whose length only the device knows; "
                f"attach its optimizer with fuse_in_backward"
            )
        optimizer = getattr(update, "__self__", None)
        if not any(optimizer is own for own in self._optimizers):
            raise ValueError(
                f"CapturedStep: optimizers lacks the {type(optimizer).__name__} that updates "
                f"{table.name} in backward"
            )
        if getattr(weight, "before_read", None) is not None:
            raise ValueError(
                f"CapturedStep: rows of {table.name} catch up with steps that they have missed, "
                f"which waits for the device; use LazyAdam, or SGD with mode='touched'"
            )

    def _replay(self, reports: Reports) -> None:
        for table in self._tables:
            table.prepare(table.inserts)
        reports.poll()
        sent = [report.replayed() for report in self._reports]
        self._graph.replay()
        increment_version(self._written)
        count_own_writes(self._written)
        for report in sent:
            report.send(reports)

    def _check_conditions(self, conditions: Conditions) -> None:
        """Raise RuntimeError after a change that replays would ignore."""
        for name, owner, value in conditions.changes():
            hint = ""
            if name == "lr" and not isinstance(value, torch.Tensor):
                hint = "make lr a tensor on the device, whose value may change, or "
            raise RuntimeError(
                f"CapturedStep: {name} of {owner} has changed since the step was captured, and "
                f"replays would not follow; {hint}make a new CapturedStep"
            )


def _alike(own: Any, leaf: Any) -> bool:
    """Return whether two leaves are tensors with equal shape and dtype, or equal non-tensors."""
    if isinstance(own, torch.Tensor) and isinstance(leaf, torch.Tensor):
        return own.shape == leaf.shape and own.dtype == leaf.dtype
    return not isinstance(own, torch.Tensor) and not isinstance(leaf, torch.Tensor) and own == leaf


def _form(leaf: Any) -> Any:
    """Return the parts of a leaf that must not change: a tensor's shape and dtype, or the value."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return f"{str(leaf.dtype).removeprefix('torch.')} {list(leaf.shape)}"


def _detached(outputs: Any) -> Any:
    return tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, outputs)
