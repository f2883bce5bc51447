"""HashTable.find against a sorted array and binary search, which is what plain torch offers."""

from collections.abc import Iterator

import torch

import sparsekit

from .common import Result, compare


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
