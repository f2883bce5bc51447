"""Keys that collide under the unseeded hash take no longer than other keys."""

import time

import numpy as np
import pytest
import torch
from conftest import generator
from reference import ops as reference

from sparsekit import HashTable, ops

MASK = 2**64 - 1


def unshift(x, shift):
    """Invert x ^ x >> shift."""
    result = x
    for _ in range(64 // shift):
        result = x ^ (result >> shift)
    return result


def key_of_hash(hash):
    """Return the key with a given hash, using the inverse of splitmix64's finaliser."""
    x = unshift(hash, 31) * pow(0x94D049BB133111EB, -1, 2**64) & MASK
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) & MASK
    x = unshift(x, 30)
    return x - 2**64 if x >= 2**63 else x


def colliding(n):
    """Return keys whose unseeded hashes agree in the upper 20 and the lower 27 bits."""
    assert n <= 2**17
    return torch.tensor([key_of_hash(0x123 << 52 | i << 27 | 77) for i in range(n)])


def random_keys(n):
    return torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator(0))


def test_the_keys_do_collide():
    keys = colliding(1000)
    x = keys.numpy().view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    assert set(x >> np.uint64(44)) == {0x123 << 8}
    assert set(x & np.uint64(2**27 - 1)) == {77}
    assert len(set(x)) == 1000


@pytest.mark.parametrize("n", [300, 3000])
def test_few_keys_move_on(device, n):
    """Colliding keys skip few full buckets; without a seed, the keys would skip about n^2 / 10."""
    passed = []
    for keys in (random_keys(n), colliding(n)):
        table = HashTable(n, device=device)
        assert torch.equal(table.find_or_insert(keys.to(device)).cpu(), torch.arange(n))
        assert torch.equal(table.find(keys.to(device)).cpu(), torch.arange(n))
        assert table.keys().tolist() == keys.tolist()
        passed.append(int(table.buckets.view(torch.int32)[:, 15].sum()))
        results = ops.unique(torch.cat([keys, keys.flip(0)]).to(device))
        for result, expected in zip(
            results, reference.unique(torch.cat([keys, keys.flip(0)])), strict=True
        ):
            assert torch.equal(result.cpu(), expected)
    assert passed[1] < 5 * (passed[0] + 20)


def seconds(calls, repeats):
    """Return the shortest thread time of each call; the calls are repeated in turn."""
    times = [[] for _ in calls]
    for _ in range(repeats):
        for call, taken in zip(calls, times, strict=True):
            argument = call[1]()
            begin = time.thread_time()
            call[0](argument)
            taken.append(time.thread_time() - begin)
    return [min(taken) for taken in times]


@pytest.mark.parametrize("call", ["insert", "find", "unique"])
def test_100_000_colliding_keys_take_as_long_as_others(call):
    n = 100_000
    tables = {}

    def filled(keys):
        if id(keys) not in tables:
            tables[id(keys)] = HashTable(n)
            tables[id(keys)].find_or_insert(keys)
        return tables[id(keys)]

    def calls(keys):
        if call == "insert":
            return lambda table: table.find_or_insert(keys), lambda: HashTable(n)
        if call == "find":
            return lambda table: table.find(keys), lambda: filled(keys)
        return ops.unique, lambda: keys

    # Without seeds, the second call took over 500 times as long as the first.
    usual, made = seconds([calls(random_keys(n)), calls(colliding(n))], 7)
    assert made < 5 * usual
