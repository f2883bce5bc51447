"""Where a gradient is not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..distributed.dtensor import local
from ..distributed.world import group_of
from ..tables.embedding_table import EmbeddingTable
from ..tables.weight import update_of

_LINES = 8  # of a message; when one gradient is not finite, often all of them are

Report = tuple[str, int | None, str]  # name, key, what is wrong


class NonFiniteGradientError(ArithmeticError):
    """A gradient has a NaN or an infinity; the same error on all ranks.

    The attributes are those of the first such gradient, in the order of ranks and then of
    parameters.

    Attributes:
        layer: name of the embedding layer, or of the dense parameter.
        key: the key whose row it is; None for a dense parameter, and for a row without a key.
        rank: the rank that has it, within the process group.
    """

    def __init__(self, message: str, layer: str, key: int | None, rank: int) -> None:
        super().__init__(message)
        self.layer = layer
        self.key = key
        self.rank = rank

    def __reduce__(self) -> tuple[type, tuple[str, str, int | None, int]]:
        return type(self), (str(self), self.layer, self.key, self.rank)


def check_finite_gradients(
    module: torch.nn.Module, *, process_group: dist.ProcessGroup | None = None
) -> None:
    """Raise if a gradient in the module has a NaN or an infinity, and say which key it belongs to.

    It waits for the device, and with several ranks it is a collective: all of them call it and all
    raise. Gradients stay as they are; repeated rows of a sparse one count as their sum.

    Args:
        module: with sparsekit layers anywhere in it, or without. Of a DTensor each rank looks at
            its own shard, within which the message counts.
        process_group: over which tables are sharded; None means that of `sparsekit.init`, or
            torch.distributed's default group.

    Raises:
        NonFiniteGradientError: there is one.
        TypeError: module is no module.
        ValueError: there is a layer that is updated in backward, which leaves no gradient.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"check_finite_gradients: module must be a torch.nn.Module, got {type(module).__name__}"
        )
    layers = [m for m in module.modules() if isinstance(m, EmbeddingTable)]
    for layer in layers:
        if update_of(layer.weight) is not None:
            raise ValueError(
                f"check_finite_gradients: {layer.name} is updated in backward, which leaves no "
                f"gradient to look at"
            )
    tables: dict[torch.nn.Parameter, EmbeddingTable] = {layer.weight: layer for layer in layers}
    found = []
    for name, parameter in module.named_parameters():
        bad = None if parameter.grad is None else _first_bad(local(parameter.grad))
        if bad is not None:
            table = tables.get(parameter)
            found.append(_of_dense(name, bad) if table is None else _of_table(table, bad))

    of_ranks = [found]
    group = group_of(process_group)
    if group is not None:
        of_ranks = of_ranks * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, found, group=group)
    reports = [(rank, *report) for rank, found in enumerate(of_ranks) for report in found]
    if not reports:
        return
    lines = [f"{name}: the gradient on rank {rank} has {what}" for rank, name, _, what in reports]
    if len(lines) > _LINES:
        lines[_LINES:] = [f"and {len(lines) - _LINES} more gradients"]
    rank, name, key, _ = reports[0]
    raise NonFiniteGradientError("\n".join(lines), name, key, rank)


def _first_bad(grad: torch.Tensor) -> tuple[list[int], float, int] | None:
    """Index and value of the first number that is not finite, and how many rows have such."""
    if grad.is_sparse:
        grad = grad.coalesce()
    values = grad._values() if grad.is_sparse else grad
    bad = ~values.isfinite()
    if not bad.any():
        return None
    first = [int(i) for i in torch.unravel_index(bad.byte().argmax(), bad.shape)]
    value = values[tuple(first)].item()
    rows = int(bad.reshape(bad.shape[:1].numel(), -1).any(1).sum())
    if grad.is_sparse:
        first[:1] = grad._indices()[:, first[0]].tolist()
    return first, value, rows


def _of_table(table: EmbeddingTable, bad: tuple[list[int], float, int]) -> Report:
    (row, column), value, rows = bad
    key: int | None = row * table.world_size + table.rank
    if table.table is not None:
        keys = table.table.keys()
        # A dense gradient, of a penalty on the whole weight, has rows that no key has yet.
        key = int(keys[row]) if row < len(keys) else None
    what = f"{value} at key {key}, row {row}, column {column}; not finite in {rows} row(s)"
    return table.name, key, what


def _of_dense(name: str, bad: tuple[list[int], float, int]) -> Report:
    index, value, _ = bad
    return name, None, f"{value} at index {tuple(index)}"
