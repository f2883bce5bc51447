"""Measures throughput for plots, by size, load factor, dim and duplication; has no targets."""

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F

import sparsekit

from .bench_segment_sum import index_add
from .common import Comparison, Curve, random_keys
from .cpu import Call, Cpu, Side
from .peers import native

# Upper bound on the memory per key while one point of a plot is measured, with R2's arrays.
BYTES_PER_KEY = 160
DIMS = (8, 16, 32, 64, 128, 256, 512)


def _sizes(cpu: Cpu, largest: int) -> list[int]:
    if cpu.quick:
        return [100, 1_000]
    return [n for n in map(int, (1e3, 1e4, 1e5, 1e6, 1e7, 1e8)) if n <= largest]


def _threads(cpu: Cpu) -> list[int]:
    return list(range(1, cpu.threads + 1))[:2]


def _of(threads: int) -> str:
    return f"{threads} thread{'s' if threads > 1 else ''}"


def hash_table(cpu: Cpu) -> Iterator[Comparison]:
    """Measure find and find_or_insert for different numbers of keys, with 1 and 2 threads."""
    free = int(_available_bytes() * 0.8 / BYTES_PER_KEY)
    for n in _sizes(cpu, 10**8):
        if n > free:
            reason = f"{free:,} fit into the memory that is available"
            cpu.has(f"curves of {n:,} keys", reason)
            continue
        yield from _find(cpu, n)
        if n <= 10**7:  # with ten times as many keys, each case would take a minute
            yield from _insert(cpu, n)


def _available_bytes() -> int:
    with open("/proc/meminfo") as info:
        return 1024 * next(int(x.split()[1]) for x in info if x.startswith("MemAvailable"))


def _find(cpu: Cpu, n: int) -> Iterator[Comparison]:
    keys = random_keys(n)
    table = sparsekit.HashTable(n)
    table.find_or_insert(keys)
    num_queries = min(n, 1_000_000)
    queries = [keys[torch.randint(0, n, (num_queries,))] for _ in range(cpu.copies(8 * n, most=8))]
    ours = [partial(table.find, q) for q in queries]
    for threads in _threads(cpu):
        curve = Curve("find", _of(threads), "keys in the table", n, num_queries)
        case = f"find among {n:,} keys, {_of(threads)}"
        yield from cpu.against_gather(
            case, ours, table.buckets.nbytes, num_queries, threads=threads, curve=curve
        )
        if threads == 1 and cpu.has("boost find", native.missing("flat_map")):
            flat_map = native.FlatMap(n)
            flat_map.emplace(keys)
            theirs: list[Call] = [partial(flat_map.find, q) for q in queries]
            yield from cpu.compare(case, ours, {"boost find": theirs}, threads=1, curve=curve)
            del flat_map, theirs


def _insert(cpu: Cpu, n: int) -> Iterator[Comparison]:
    keys = random_keys(n)
    table = sparsekit.HashTable(n)

    def clear() -> None:
        sparsekit.ops.hash_table_clear_(table.buckets)
        table.size.zero_()

    ours = Side([partial(table.find_or_insert, keys)], clear)
    for threads in _threads(cpu):
        curve = Curve("find_or_insert", _of(threads), "new keys", n, n)
        case = f"insert {n:,} keys, {_of(threads)}"
        yield from cpu.against_gather(
            case, ours, table.buckets.nbytes, n, threads=threads, curve=curve
        )
        if threads == 1 and cpu.has("boost emplace", native.missing("flat_map")):
            flat_map = native.FlatMap(n)
            theirs = Side([partial(flat_map.emplace, keys)], flat_map.clear)
            yield from cpu.compare(case, ours, {"boost emplace": theirs}, threads=1, curve=curve)


def load(cpu: Cpu) -> Iterator[Comparison]:
    """Measure finding the same keys in full tables with different load factors."""
    n = cpu.size(4_000_000, 1_000)
    keys = random_keys(n)
    queries = [keys[torch.randint(0, n, (min(n, 1_000_000),))] for _ in range(8)]
    for tenths in range(1, 11):
        table = sparsekit.HashTable(n, load_factor=tenths / 10)
        table.find_or_insert(keys)
        yield from cpu.against_gather(
            f"find among {n:,} keys, load {tenths / 10}",
            [partial(table.find, q) for q in queries],
            table.buckets.nbytes,
            len(queries[0]),
            threads=1,
            curve=Curve("find by load", "1 thread", "load factor", tenths / 10, len(queries[0])),
        )


class _FullTable:
    """A table at its budget; each method looks up one key for each row that a sweep drops."""

    def __init__(self, rows: int) -> None:
        spare = max(rows // 10, 8192)
        self._layer = sparsekit.DistributedEmbedding(
            "sum", rows + spare, 16, 1, on_full="evict", max_rows=rows, name="full"
        )
        self.keys, self._batch, self._seen = rows // 20, min(4096, rows // 20), 0
        for _ in range(21):
            self.bring()

    def bring(self) -> None:
        """Look up new keys; each eventually displaces a row."""
        self._look_up(self._seen)
        self._seen += self.keys

    def ask(self) -> None:
        """Look up the keys from the last call to `bring`."""
        self._look_up(self._seen - self.keys)

    def _look_up(self, first: int) -> None:
        for keys in torch.arange(first, first + self.keys).split(self._batch):
            self._layer(keys[:, None, None])


def evict(cpu: Cpu) -> Iterator[Comparison]:
    """Measure lookups of new keys in full tables; the peer looks up keys that have rows."""
    for rows in [1_000] if cpu.quick else [10**5, 10**6, 10**7]:
        table = _FullTable(rows)
        yield from cpu.compare(
            f"{table.keys:,} new keys in a full table of {rows:,} rows",
            [table.bring],
            {"keys with rows": [table.ask]},
            threads=1,
            curve=Curve("eviction", "1 thread", "rows of the table", rows, table.keys),
        )


def unique(cpu: Cpu) -> Iterator[Comparison]:
    """Measure unique for different numbers of distinct keys and of repeats per key."""
    points = [(n, 1) for n in _sizes(cpu, 10**7)]
    duplicated = cpu.size(4_000_000, 1_000)
    points += [(duplicated, 10**power) for power in range(4)]
    for i, (n, repeats) in enumerate(points):
        by_size = i < len(points) - 4
        distinct = random_keys(n // repeats)
        copies = cpu.copies(8 * n, most=8)
        inputs = [distinct[torch.randint(0, len(distinct), (n,))] for _ in range(copies)]
        if by_size:
            inputs = [random_keys(n, seed) for seed in range(copies)]
        case = f"unique of {n:,} keys{'' if by_size else f', each {repeats:,} times'}"
        for threads in _threads(cpu):
            yield from cpu.compare(
                f"{case}, {_of(threads)}",
                [partial(sparsekit.ops.unique, k) for k in inputs],
                {
                    "torch.unique": [
                        partial(torch.unique, k, return_inverse=True, return_counts=True)
                        for k in inputs
                    ]
                },
                threads=threads,
                curve=Curve(
                    "unique" if by_size else "unique by duplication",
                    _of(threads),
                    "keys" if by_size else "times each key comes",
                    n if by_size else repeats,
                    n,
                ),
            )


def segment_sum(cpu: Cpu) -> Iterator[Comparison]:
    """Measure unsorted_segment_sum for different dims, with uniform ids."""
    n, segments = cpu.size(425_984, 1_000), cpu.size(60_000, 100)
    for dim in DIMS:
        pairs = [
            (torch.randn(n, dim), torch.randint(0, segments, (n,)))
            for _ in range(cpu.copies(4 * n * dim, most=8))
        ]
        for threads in _threads(cpu):
            yield from cpu.compare(
                f"segment sum of {n:,} x {dim}, {_of(threads)}",
                [partial(sparsekit.ops.unsorted_segment_sum, *x, segments) for x in pairs],
                {"zeros + index_add_": [partial(index_add, *x, segments) for x in pairs]},
                threads=threads,
                num_bytes=n * (4 * dim + 8) + segments * 4 * dim,
                curve=Curve("unsorted_segment_sum", _of(threads), "dim", dim, n),
            )


@torch.no_grad()
def embedding_bag(cpu: Cpu) -> Iterator[Comparison]:
    """Measure embedding_bag for different dims, with uniform rows."""
    num_rows, n = cpu.size(1_000_000, 1_000), cpu.size(425_984, 400)
    offsets = torch.arange(0, n + 1, 2)
    inputs = [torch.randint(0, num_rows, (n,)) for _ in range(cpu.copies(8 * n, most=8))]
    bag = partial(F.embedding_bag, mode="sum", include_last_offset=True)
    for dim in DIMS:
        weight = torch.randn(num_rows, dim)
        for threads in _threads(cpu):
            yield from cpu.compare(
                f"bags of 2, {n:,} rows x {dim}, {_of(threads)}",
                [partial(sparsekit.ops.embedding_bag, weight, r, offsets) for r in inputs],
                {"F.embedding_bag": [partial(bag, r, weight, offsets) for r in inputs]},
                threads=threads,
                num_bytes=n * (4 * dim + 8) + len(offsets) * (4 * dim + 8),
                curve=Curve("embedding_bag", _of(threads), "dim", dim, n),
            )
