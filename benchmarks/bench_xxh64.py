"""Compares hashing.xxh64 with a Python loop that calls the package xxhash."""

import random
import sys
from collections.abc import Iterator
from functools import partial

from sparsekit.hashing import xxh64

from .common import Comparison
from .cpu import Call, Cpu

_LOOP = "loop over xxhash"


def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time hashing a million distinct strings: first of 12 to 18 characters, then of 1 to 60."""
    n = cpu.size(1_000_000, 500)
    similar = [[f"user_id_{i}_{turn + 100}" for i in range(n)] for turn in range(2)]
    mixed = [_mixed(n, turn) for turn in range(2)]
    loops = {}
    if cpu.has_module(_LOOP, "xxhash"):
        from xxhash import xxh64_intdigest

        def loop(strings: list[str]) -> list[int]:
            return [xxh64_intdigest(string.encode()) for string in strings]

        for name, inputs in (("str", similar), ("mixed str", mixed)):
            for strings in inputs:
                assert [code % 2**64 for code in xxh64(strings).tolist()] == loop(strings)
            loops[name] = {_LOOP: [partial(loop, strings) for strings in inputs]}
    for name, inputs in (("str", similar), ("mixed str", mixed)):
        ours: list[Call] = [partial(xxh64, strings) for strings in inputs]
        line = f"xxh64 of 1M {name.replace('str', 'strings')}"
        # Count the bytes of the string objects, a pointer to each, and the hashes.
        num_bytes = sum(map(sys.getsizeof, inputs[0])) + 16 * n
        case, peers = f"xxh64 of {n:,} {name}", loops.get(name, {})
        yield from cpu.compare(case, ours, peers, line, num_bytes=num_bytes)
    if not cpu.has_module("Arrow", "pyarrow"):
        return
    import pyarrow

    columns = [pyarrow.array(strings) for strings in mixed]
    for column, strings in zip(columns, mixed, strict=True):
        assert xxh64(column).equal(xxh64(strings))
    ours = [partial(xxh64, column) for column in columns]
    line = "xxh64 of 1M mixed strings, Arrow"
    case = f"xxh64 of an Arrow column of {n:,} mixed str"
    num_bytes = columns[0].nbytes + 8 * n  # size of strings, offsets and hashes
    peers = loops.get("mixed str", {})
    yield from cpu.compare(case, ours, peers, line, num_bytes=num_bytes)


def _mixed(n: int, seed: int) -> list[str]:
    """Return strings of several kinds, such as numbers, names and addresses, in random order."""
    draw = random.Random(seed)
    kinds = (
        lambda i: str(draw.randrange(10 ** draw.randrange(1, 19))),
        lambda i: f"user_id_{i}",
        lambda i: f"name {i} of Zürich",
        lambda i: f"https://example.org/{draw.randrange(10**9)}/page?id={i}"[
            : draw.randrange(30, 60)
        ],
    )
    return [draw.choice(kinds)(i) for i in range(n)]
