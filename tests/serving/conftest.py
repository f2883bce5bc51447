"""Selects the library and its kernels for tests of serving."""

import os
from pathlib import Path

import numpy as np
import pytest

from sparsekit import _load
from sparsekit.serving import Snapshot, _library

from . import made

# Under a sanitizer, load the library given by tests/sanitize.sh instead of the usual one.
if _given := os.environ.get("SPARSEKIT_SERVING_LIBRARY"):
    _library.LIBRARY = Path(_given)

# Instruction sets that this processor has.
_NEEDS = {**_load.ENGINES, "generic": frozenset()}
ISAS = [isa for isa, flags in _NEEDS.items() if flags <= _load.processor_flags()]


@pytest.fixture(params=ISAS)
def isa(request, monkeypatch):
    """Open snapshots with the kernels of each instruction set."""
    monkeypatch.setenv("SPARSEKIT_SERVING_ISA", request.param)
    return request.param


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes a snapshot and opens it; all are closed after the test."""
    snapshots = []

    def open_(tables, name="model.sks", **options):
        path = tmp_path / name
        path.write_bytes(tables if isinstance(tables, bytes) else made.snapshot(tables))
        snapshots.append(Snapshot(path, **options))
        return snapshots[-1]

    yield open_
    for snapshot in snapshots:
        snapshot.close()


@pytest.fixture
def rng():
    return np.random.default_rng(0)
