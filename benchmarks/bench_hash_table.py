"""Compares HashTable with boost's flat map, random reads (R2) and, for find, binary search."""

from collections.abc import Iterator, Mapping
from functools import partial

import torch

import sparsekit

from .common import Comparison, random_keys
from .cpu import Call, Cpu, Side
from .gpu import Gpu
from .peers import native


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time inserting new keys and finding known keys at random, in tables in and out of cache."""
    for full, line in (
        (30_000_000, "find, 10M+ keys, 1 thread"),
        (10_000_000, "find, 10M+ keys, 1 thread"),
        (100_000, "find in cache, 100k keys, 1 thread"),
    ):
        yield from _find(cpu, full, line)
    yield from _insert(cpu, cpu.size(10_000_000, 500))


def _find(cpu: Cpu, full: int, line: str) -> Iterator[Comparison]:
    in_cache = "cache" in line
    n = cpu.size(full, full // 50_000)
    keys = random_keys(n)
    table = sparsekit.HashTable(n)
    table.find_or_insert(keys)
    num_queries = min(n, 1_000_000)
    count = 1 if in_cache else cpu.copies(8 * num_queries)
    rows = [torch.randint(0, n, (num_queries,)) for _ in range(count)]
    queries = [keys[r] for r in rows]
    for r, q in zip(rows, queries, strict=True):
        assert torch.equal(table.find(q), r)
    ours = [partial(table.find, q) for q in queries]
    peers: dict[str, list[Call]] = {}
    if cpu.has("boost find", native.missing("flat_map")):
        flat_map = native.FlatMap(n)
        flat_map.emplace(keys)
        for r, q in zip(rows, queries, strict=True):
            assert torch.equal(flat_map.find(q), r)
        peers["boost find"] = [partial(flat_map.find, q) for q in queries]
    if full <= 10_000_000:
        ordered = keys.sort().values
        peers["torch.searchsorted"] = [partial(torch.searchsorted, ordered, q) for q in queries]
    case = f"find {num_queries:,} of {n:,} keys, 1 thread"
    yield from cpu.compare(case, ours, peers, line, threads=1)
    if not in_cache:
        table_bytes = table.buckets.nbytes
        yield from cpu.against_gather(case, ours, table_bytes, num_queries, line, threads=1)


def _insert(cpu: Cpu, n: int) -> Iterator[Comparison]:
    """Time inserts into cleared tables, whose memory has the final size and is already mapped."""
    table = sparsekit.HashTable(n)
    inputs = [random_keys(n, seed) for seed in range(2)]

    def clear() -> None:
        sparsekit.ops.hash_table_clear_(table.buckets)
        table.size.zero_()

    ours = Side([partial(table.find_or_insert, keys) for keys in inputs], clear)
    peers: Mapping[str, Side] = {}
    expected = torch.arange(n)
    if cpu.has("boost emplace", native.missing("flat_map")):
        flat_map = native.FlatMap(n)
        theirs = [partial(flat_map.emplace, keys) for keys in inputs]
        peers = {"boost emplace": Side(theirs, flat_map.clear)}
        for keys in inputs:
            flat_map.clear()
            assert torch.equal(flat_map.emplace(keys), expected)
    for keys in inputs:
        clear()
        assert torch.equal(table.find_or_insert(keys), expected)
    line = "find_or_insert, all new, 10M, 1 thread"
    case = f"find_or_insert {n:,} new keys"
    yield from cpu.compare(f"{case}, 1 thread", ours, peers, line, threads=1)
    yield from cpu.compare(case, ours, peers)


def run_gpu(gpu: Gpu) -> Iterator[Comparison]:
    """Time find and find_or_insert in a table with 64M places, against reading a bucket per key."""
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
    """Time inserts into a half-full table, which is restored before each call."""
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
                table.hash_seed,
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
