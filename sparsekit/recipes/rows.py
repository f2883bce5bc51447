"""Chooses the number of rows in an application's tables, if the user gives none."""

from collections.abc import Mapping
from typing import Any

import torch

# Number of rows in a table that does not grow. Growing on CUDA is avoided, since it has not yet
# been run on a GPU.
_ROWS = 100_000


def rows_of_table(rows: int | None, options: Mapping[str, Any]) -> int | None:
    """Return a table's number of rows, or None (never on CUDA) for a table that grows.

    Args:
        rows: the user's number; None to choose one.
        options: the table's options; some rule out growth.
    """
    if rows is not None:
        return rows
    device = torch.device(options.get("device") or torch.get_default_device())
    grows = options.get("on_full") != "evict" and options.get("use_hashtable", True)
    return None if grows and device.type != "cuda" else _ROWS
