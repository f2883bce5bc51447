"""Compares the overhead of calls on tiny inputs with the overhead of torch's clone."""

from collections.abc import Iterator
from functools import partial

import torch

import sparsekit
from sparsekit import ops

from .common import Comparison
from .cpu import Call, Cpu


@torch.no_grad()
def run(cpu: Cpu) -> Iterator[Comparison]:
    """Time calls with 8 keys, on a table of 8 rows and a weight of shape [8, 16]."""
    keys = torch.arange(8)
    weight, offsets = torch.randn(8, 16), torch.arange(0, 9, 2)
    table = sparsekit.HashTable(8)
    table.find_or_insert(keys)
    calls: dict[str, Call] = {
        "unique": partial(ops.unique, keys),
        "hash_table_find": partial(ops.hash_table_find, table.buckets, table.hash_seed, keys),
        "hash_table_find_or_insert_": partial(
            ops.hash_table_find_or_insert_, table.buckets, table.hash_seed, table.size, keys, 8
        ),
        "HashTable.find_or_insert": partial(table.find_or_insert, keys),
        "unsorted_segment_sum": partial(ops.unsorted_segment_sum, weight, keys, 8),
        "gather_rows": partial(ops.gather_rows, weight, keys),
        "embedding_bag": partial(ops.embedding_bag, weight, keys, offsets),
        "bucketize": partial(ops.bucketize, keys, 2),
    }
    for name, call in calls.items():
        clone: list[Call] = [keys.clone]
        # A HashTable method calls two ops, so the target for one op does not apply.
        line = "" if name.startswith("HashTable") else "op call, 8 keys"
        yield from cpu.compare(f"call of {name}, 8 keys", [call], {"clone": clone}, line)
