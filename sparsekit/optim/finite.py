"""Finds gradients that are not finite."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..distributed.dtensor import local
from ..distributed.world import group_of
from ..tables.embedding_table import EmbeddingTable
from ..tables.weight import update_of

# Largest number of lines in a message: often one non-finite gradient makes all others non-finite.
_LINES = 8

Report = tuple[str, int | None, str]  # name of the layer or parameter, key, and description


class NonFiniteGradientError(ArithmeticError):
    """Raised on all ranks, with the same message, if a gradient has a NaN or an infinity.

    The attributes describe the first such gradient, ordered by rank and then by parameter.

    Attributes:
        layer: name of the embedding layer, or of the dense parameter.
        key: the key of the gradient's row; None for a dense parameter, and for a row without a key.
        rank: the rank, within the process group, that has the gradient.
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
    """Raise an error that names the layer and key if a gradient has a NaN or an infinity.

    The check waits for the device. With several ranks it is a collective: all ranks must call it,
    and all raise. Gradients are left unchanged; repeated rows in a sparse gradient count as their
    sum.

    Args:
        module: any module, with or without sparsekit layers. For a DTensor each rank checks its own
            shard, and the message gives the index within the shard.
        process_group: the group over which tables are sharded; None means the group of
            `sparsekit.init`, or torch.distributed's default group.

    Raises:
        NonFiniteGradientError: a gradient is not finite.
        TypeError: module is not a module.
        ValueError: a layer is updated in backward, so it has no gradient to check.
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
            index, value, _ = bad
            of_dense = name, None, f"{value} at index {tuple(index)}"
            found.append(of_dense if table is None else _of_table(table, bad))

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
    """Return the index and value of the first non-finite element, and how many rows have one."""
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
        # A dense gradient, such as from a penalty on the whole weight, includes rows without a key.
        key = int(keys[row]) if row < len(keys) else None
    what = f"{value} at key {key}, row {row}, column {column}; not finite in {rows} row(s)"
    return table.name, key, what
