"""All that is fuzzed, by name, and how one case of it is run."""

import contextlib

import simt

from . import groups, keys, layers, refusals, rows, updates
from .case import Case

OPS = keys.OPS | rows.OPS | groups.OPS | updates.OPS | layers.OPS | refusals.OPS


def run(name: str, case: Case) -> None:
    """Raise what the case raises, a `Mismatch` above all."""
    mode = simt.SimtMode() if case.backend == "simt" else contextlib.nullcontext()
    with mode:
        OPS[name](case)
