"""The number of rows of an application's tables, where the user gives none."""

from collections.abc import Mapping
from typing import Any

import torch

# Rows of a table that cannot grow.
_ROWS = 100_000


def rows_of_table(rows: int | None, options: Mapping[str, Any]) -> int | None:
    """Return a number of rows for a table; None, for one that grows, on the CPU.

    Args:
        rows: what the user says; None to choose.
        options: options of the table, of which on_full="evict" needs a number.
    """
    grows = torch.get_default_device().type == "cpu" and options.get("on_full") != "evict"
    return rows if rows is not None else None if grows else _ROWS
