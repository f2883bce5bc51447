"""Compares init_rows_ on a GPU with torch's uniform_ and normal_, which do not depend on keys."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Comparison
from .gpu import Gpu


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time initialization of consecutive rows, against just reading keys and writing rows."""
    for dim in (16, 64, 128):
        n = gpu.fit(gpu.size((1 << 29) // dim, 100), bytes_each=8 * dim)
        keys = gpu.distinct_keys(0, n)
        out = torch.empty(n, dim, device=gpu.device)
        fill = {"uniform": out.uniform_, "normal": out.normal_}
        for distribution, a, b in ("uniform", -0.05, 0.05), ("normal", 0.0, 0.05):
            ours = partial(sparsekit.ops.init_rows_, out, keys, distribution=distribution, a=a, b=b)
            timing = gpu.time(ours)
            theirs = gpu.time(partial(fill[distribution], a, b))
            case = f"init_rows_ {n:,} x {dim} {distribution}"
            yield gpu.against_r1(case, timing, n * (8 + 4 * dim))
            yield from gpu.against(case, timing, f"{distribution}_", theirs)
