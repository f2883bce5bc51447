"""The number of rows of an application's tables, where the user gives none."""

from collections.abc import Mapping
from typing import Any

import torch

# Rows of a table that does not grow. Growing on CUDA has not run on a GPU yet, so it is not chosen.
_ROWS = 100_000


def rows_of_table(rows: int | None, options: Mapping[str, Any]) -> int | None:
    """Return a number of rows for a table; None, for one that grows, on the CPU.

    Args:
        rows: what the user says; None to choose.
        options: options of the table, some of which need a number.
    """
    if rows is not None:
        return rows
    device = torch.device(options.get("device") or torch.get_default_device())
    grows = options.get("on_full") != "evict" and options.get("use_hashtable", True)
    return None if grows and device.type != "cuda" else _ROWS
