"""Compares gather_rows with index_select on a GPU (other benchmarks cover its CPU version)."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Comparison
from .gpu import Gpu


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time gathering random rows of a large table, against reading row numbers and copying rows."""
    floats = gpu.fit(gpu.size(1 << 31, 1 << 14), bytes_each=6)
    storage = gpu.randn(floats)
    for dim in (16, 64, 128, 256):
        table = storage.view(-1, dim)
        n = gpu.size((1 << 29) // dim, 100)
        rows = gpu.randint(len(table), n)
        assert torch.equal(sparsekit.ops.gather_rows(table, rows), table[rows])
        ours = gpu.time(partial(sparsekit.ops.gather_rows, table, rows))
        theirs = gpu.time(partial(torch.index_select, table, 0, rows))
        case = f"gather_rows {n:,} of {len(table):,} x {dim}"
        yield gpu.against_r1(case, ours, n * (8 + 8 * dim))
        yield from gpu.against(case, ours, "index_select", theirs)
