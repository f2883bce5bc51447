"""HashTable.find against a sorted array and binary search, which is what plain torch offers."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit

from .common import Result, compare
from .gpu import Comparison, Gpu


def run(quick: bool) -> Iterator[Result]:
    """Find of present keys, in and out of cache, in random order."""
    for n in (1_000,) if quick else (100_000, 10_000_000):
        generator = torch.Generator().manual_seed(0)
        keys = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator)
        queries = keys[torch.randperm(n, generator=generator)[:1_000_000]]
        table = sparsekit.HashTable(n)
        table.find_or_insert(keys)
        ordered = keys.sort().values
        assert torch.equal(keys[table.find(queries)], queries)

        def ours(table: sparsekit.HashTable = table, q: torch.Tensor = queries) -> object:
            return table.find(q)

        def theirs(ordered: torch.Tensor = ordered, q: torch.Tensor = queries) -> object:
            return torch.searchsorted(ordered, q)

        case = f"find {len(queries):,} of {n:,} keys"
        yield compare(case, ours, "torch.searchsorted", theirs)


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Find and find_or_insert in a table of 64M slots: one line is to be read for each key."""
    slots = gpu.fit(gpu.size(64 << 20, 500), bytes_each=64)
    for load in (0.6, 0.75, 0.9):
        table = sparsekit.HashTable(int(slots * load), device=gpu.device, load_factor=load)
        keys = gpu.distinct_keys(0, table.capacity)
        for part in keys.split(4 << 20):
            table.find_or_insert(part)
        for n in gpu.size(1 << 20, 100), gpu.size(16 << 20, 200):
            rows = gpu.randint(len(keys), n)
            queries = keys[rows]
            assert torch.equal(table.find(queries), rows)
            absent = gpu.distinct_keys(len(keys), len(keys) + n)
            assert int(table.find(absent).max()) == -1
            goal = "find, load <= 0.75" if load <= 0.75 else "find, load 0.9"
            for name, q, target in ("", queries, goal), (" absent", absent, ""):
                timing = gpu.time(partial(table.find, q))
                case = f"find {n:,}{name} keys, {slots:,} slots, load {load}"
                yield gpu.against_r2(case, timing, n, table.buckets.nbytes, target)
    del table, keys
    yield from _inserts(gpu, slots)


def _inserts(gpu: Gpu, slots: int) -> Iterator[Comparison]:
    """Into a table that is half full, and again as it was before each call."""
    table = sparsekit.HashTable(int(slots * 0.75), device=gpu.device, load_factor=0.75)
    half = table.capacity // 2
    known = gpu.distinct_keys(0, half)
    for part in known.split(4 << 20):
        table.find_or_insert(part)
    buckets, size = table.buckets.clone(), table.size.clone()

    def restore() -> None:
        table.buckets.copy_(buckets)
        table.size.copy_(size)

    for n in gpu.size(1 << 20, 50), gpu.size(16 << 20, 100):
        for share, name in (1.0, "all new"), (0.1, "10% new"):
            new = gpu.distinct_keys(half, half + int(n * share))
            keys = torch.cat([new, known[gpu.randint(half, n - len(new))]])
            keys = keys[torch.randperm(n, generator=gpu.generator, device=gpu.device)]
            op = partial(
                sparsekit.ops.hash_table_find_or_insert_,
                table.buckets,
                table.size,
                keys,
                table.capacity,
            )
            restore()
            table.find_or_insert(keys)
            assert len(table) == half + len(new)
            case = f"find_or_insert {n:,} keys, {name}"
            target = f"find_or_insert, {name}"
            timing = gpu.time(op, restore)
            yield gpu.against_r2(case, timing, n, buckets.nbytes, target)
            whole = gpu.time(partial(table.find_or_insert, keys), restore)
            yield from gpu.against(f"{case}, HashTable", whole, "the op", timing, wall=True)
