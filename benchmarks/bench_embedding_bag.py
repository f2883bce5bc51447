"""Compares embedding_bag's forward pass with F.embedding_bag and FBGEMM's TBE."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import sparsekit

from .common import Comparison, assert_same_sums, zipf_keys
from .cpu import Call, Cpu
from .gpu import Gpu, Timing
from .peers import fbgemm


@torch.no_grad()
def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time bags of 2 and 20 rows from a large table."""
    num_rows, n = cpu.size(1_000_000, 1_000), cpu.size(425_984, 400)
    for dim in (16, 64, 128, 256):
        weight = torch.randn(num_rows, dim)
        table = None
        if cpu.has("FBGEMM TBE", fbgemm.missing()):
            table = fbgemm.table(weight)
        for kind, exponent in ("uniform", 0.0), ("zipf 1.2", 1.2):
            inputs = [zipf_keys(n, exponent, num_rows, seed) for seed in range(cpu.copies(8 * n))]
            for per_bag in (2, 20):
                offsets = torch.arange(0, n + 1, per_bag)
                end = int(offsets[-1])
                rows = [r[:end] for r in inputs]
                bag = partial(F.embedding_bag, mode="sum", include_last_offset=True)
                peers: dict[str, list[Call]] = {
                    "F.embedding_bag": [partial(bag, r, weight, offsets) for r in rows]
                }
                if table is not None:
                    peers["FBGEMM TBE"] = [partial(table, r, offsets) for r in rows]
                ours = [partial(sparsekit.ops.embedding_bag, weight, r, offsets) for r in rows]
                for theirs in peers.values():
                    for one, other in zip(ours, theirs, strict=True):
                        assert_same_sums(one(), other())
                yield from cpu.compare(
                    f"bags of {per_bag}, {end:,} of {num_rows:,} x {dim} {kind}",
                    ours,
                    peers,
                    "embedding_bag forward",
                    num_bytes=end * (4 * dim + 8) + len(offsets) * (4 * dim + 8),
                )


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time bags on an 8 GiB table, against just reading all inputs and writing the outputs."""
    floats = gpu.fit(gpu.size(1 << 31, 1 << 14), bytes_each=5)
    storage = gpu.randn(floats)
    for dim in (16, 32, 64, 128, 256):
        weight = storage.view(-1, dim)
        n = gpu.size((1 << 29) // dim, 240)
        target = {16: "", 32: "embedding_bag, D 32-64", 64: "embedding_bag, D 32-64"}
        for name, rows in (
            ("uniform", gpu.randint(len(weight), n)),
            ("zipf 1.05", gpu.zipf(n, 1.05, len(weight))),
        ):
            for per_bag in (2, 20):
                offsets = torch.arange(0, n + 1, per_bag, device=gpu.device)
                rows = rows[: int(offsets[-1])]
                ours = partial(sparsekit.ops.embedding_bag, weight, rows, offsets)
                theirs = partial(
                    F.embedding_bag, rows, weight, offsets, mode="sum", include_last_offset=True
                )
                assert_same_sums(ours(), theirs())
                timing = gpu.time(ours)
                case = f"bags of {per_bag}, {len(rows):,} of {len(weight):,} x {dim} {name}"
                num_bytes = len(rows) * (4 * dim + 8) + len(offsets) * (4 * dim + 8)
                # Set no target for zipf: since most rows are in the cache, the op may exceed R1,
                # the speed of memory.
                goal = target.get(dim, "embedding_bag, D >= 128") if name == "uniform" else ""
                yield gpu.against_r1(case, timing, num_bytes, goal)
                yield from gpu.against(case, timing, "F.embedding_bag", gpu.time(theirs))
    yield from _pooled_keys(gpu, storage.view(-1, 128))


def _pooled_keys(gpu: Gpu, weight: torch.Tensor) -> Iterator[Comparison]:
    """Time bags of raw keys, against pooling known rows plus reading one bucket per key."""
    table = sparsekit.HashTable(len(weight), device=gpu.device)
    keys = gpu.distinct_keys(0, table.capacity)
    for part in keys.split(4 << 20):
        table.find_or_insert(part)
    n, per_bag = gpu.size(4 << 20, 80), 20
    offsets = torch.arange(0, n + 1, per_bag, device=gpu.device)
    n = int(offsets[-1])
    rows = gpu.randint(len(weight), n)
    queries = keys[rows]

    def pool_rows() -> torch.Tensor:
        return sparsekit.ops.embedding_bag(weight, rows, offsets)

    def pool_keys() -> torch.Tensor:
        return sparsekit.ops.embedding_bag(weight, table.find(queries), offsets)

    assert torch.equal(pool_rows(), pool_keys())
    known = gpu.time(pool_rows)
    lines_ms = 1e3 * n / gpu.gather_roof(table.buckets.nbytes)
    least = [ms + lines_ms for ms in known.events]
    yield from gpu.against(
        f"keys to bags of {per_bag}, {n:,} of {len(weight):,} x {weight.shape[1]}",
        gpu.time(pool_keys),
        "known rows + keys / R2",
        Timing(least, least),
        "keys to pooled vectors",
    )
