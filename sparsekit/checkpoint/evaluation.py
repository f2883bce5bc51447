"""Describes how lookups in evaluation read a table, and brings its rows up to date for reading."""

from __future__ import annotations

from ..tables.embedding_table import EmbeddingTable
from ..tables.reports import raise_errors
from .manifest import Lookups


def bring_up_to_date(layer: EmbeddingTable) -> None:
    """Bring a table's rows to the state that lookups would read now.

    Raises:
        RuntimeError: the table is on the meta device.
        IndexError, ValueError, TableFullError: see `sparsekit.raise_errors`.
    """
    raise_errors(layer.weight.device)
    layer.refuse_meta()
    layer.catch_up()
    if layer.table is not None:
        layer.weight.follow_keys()  # apply loaded states that are still pending


def lookups_of(layer: EmbeddingTable) -> Lookups:
    """Describe how lookups in evaluation read a table."""
    fallbacks, miss = layer.fallback, "initial"
    if layer.table is None:
        miss = "error"
    elif fallbacks is not None:
        miss = "fallback"
    elif layer.absent is not layer.initializer:
        miss = "zeros"
    combiner = getattr(layer, "combiner", "none")
    if not isinstance(combiner, str):  # one for each slot
        combiner = combiner[0] if len(set(combiner)) == 1 else "none"
    rows = 0 if fallbacks is None else fallbacks.rows
    return Lookups(miss, rows, combiner, layer.padding_key, layer.max_norm is not None)
