"""Lists all fuzzed ops by name, and runs a case of one."""

import contextlib

import simt

from . import groups, keys, layers, refusals, rows, updates
from .case import Case

OPS = keys.OPS | rows.OPS | groups.OPS | updates.OPS | layers.OPS | refusals.OPS


def run(name: str, case: Case) -> None:
    """Run a case. Its errors, in particular `Mismatch`, propagate."""
    mode = simt.SimtMode() if case.backend == "simt" else contextlib.nullcontext()
    with mode:
        OPS[name](case)
