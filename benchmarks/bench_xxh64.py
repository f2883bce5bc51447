"""hashing.xxh64 against a Python loop over the package xxhash."""

from collections.abc import Iterator
from functools import partial

import sparsekit

from .common import Comparison
from .cpu import Call, Cpu


def run(cpu: Cpu) -> Iterator[Comparison]:
    """A million different strings of 12 to 18 characters."""
    n = cpu.size(1_000_000, 500)
    inputs = [[f"user_id_{i}_{turn + 100}" for i in range(n)] for turn in range(2)]
    peers: dict[str, list[Call]] = {}
    if cpu.has_module("loop over xxhash", "xxhash"):
        from xxhash import xxh64_intdigest

        def loop(strings: list[str]) -> list[int]:
            return [xxh64_intdigest(string.encode()) for string in strings]

        for strings in inputs:
            unsigned = [code % 2**64 for code in sparsekit.hashing.xxh64(strings).tolist()]
            assert unsigned == loop(strings)
        peers["loop over xxhash"] = [partial(loop, strings) for strings in inputs]
    ours: list[Call] = [partial(sparsekit.hashing.xxh64, strings) for strings in inputs]
    yield from cpu.compare(f"xxh64 of {n:,} str", ours, peers, "xxh64 of 1M strings")
