"""Rows, states and vectors may lie more than 2^32 elements into a tensor.

The tensors are mappings of which only a few pages are ever touched, so they cost no memory.
"""

import math
import mmap

import pytest
import torch
from conftest import randn, same_bits
from simt_counts import counted

from sparsekit import ops

from .optimizer_rules import CASES

DIM = 64
ROWS = 2**27 + 3  # 2^33 elements
# The rows begin below and beyond 2^31 and 2^32 elements.
FAR = torch.tensor([7, 2**25 - 1, 2**25, 2**26, ROWS - 1])
OPS = torch.ops.sparsekit


def reserved(*shape, dtype=torch.float32):
    """Return zeros that take memory only where they are written."""
    reserve = 0x4000  # Linux's MAP_NORESERVE, which Python defines from 3.13 on
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserve
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def table_at(rows, near):
    """Return a table with ROWS rows that has the rows of `near` at `rows`."""
    table = reserved(ROWS, DIM)
    table[rows] = near
    return table


def test_rows_that_are_read(engine):
    near, numbers = randn(len(FAR), DIM), torch.arange(len(FAR))
    far = table_at(FAR, near)
    assert same_bits(ops.gather_rows(far, FAR), near)
    offsets = torch.tensor([0, 2, 5])
    pooled = [ops.embedding_bag(near, numbers, offsets), ops.embedding_bag(far, FAR, offsets)]
    assert same_bits(*pooled)


def test_rows_that_are_initialized(engine):
    near, far, keys = (
        torch.zeros(len(FAR), DIM),
        reserved(ROWS, DIM),
        torch.arange(5) * 2**40 - 2**62,
    )
    for weight, rows in ((near, torch.arange(len(FAR))), (far, FAR)):
        ops.init_rows_(weight, keys, rows, seed=3, distribution="normal", a=0.0, b=1.0)
    assert same_bits(far[FAR], near)


def step(case, weight, rows, op):
    """Take a step of `op` on five rows with given gradients; return the rows' new values."""
    rule, settings, states = CASES[case]
    make = reserved if len(weight) == ROWS else torch.zeros
    kept = [make(len(weight), DIM) for _ in range(states)]
    op(weight, rows, kept, torch.tensor(3), rule, settings)
    return [tensor[rows] for tensor in (weight, *kept)]


def update_rows(weight, rows, states, number, rule, settings):
    grad = randn(len(rows), DIM, seed=1)
    ops.update_rows_([weight], states, [], [rows], [grad], [number], rule, settings)


def group_update(weight, rows, states, number, rule, settings):
    index, counts = torch.tensor([0, 1, 2, 3, 4, 1], dtype=torch.int32), torch.tensor([5])
    bags = torch.tensor([0, 2, 6], dtype=torch.int32)
    # The second bag's gradient lies 2^32 elements after the first one.
    features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 5, 2**32]])
    grad = reserved(2**32 + DIM + 5)
    grad[5 : 5 + DIM], grad[-DIM:] = randn(2, DIM, seed=2)
    listed = torch.cat([rows, rows[:1]]).int()
    ops.group_embedding_bag_update_(
        [grad], index, listed, counts, bags, features, [], None, [weight], states, [], [number],
        rule, settings,
    )  # fmt: skip


@pytest.mark.parametrize("op", [update_rows, group_update])
@pytest.mark.parametrize("case", ["lazy adam", "momentum"])
def test_rows_that_are_updated(engine, case, op):
    near = randn(len(FAR), DIM)
    far = step(case, table_at(FAR, near), FAR, op)
    for one, other in zip(far, step(case, near, torch.arange(len(FAR)), op), strict=True):
        assert same_bits(one, other)


def group_of(rows):
    """Return arguments that pooling and its backward share: two bags of five rows."""
    index, bags = torch.arange(5, dtype=torch.int32), torch.tensor([0, 2, 5], dtype=torch.int32)
    return index, rows.int(), torch.tensor([5]), bags


def test_bags_of_many_tables(engine):
    near = randn(len(FAR), DIM)
    far, out = table_at(FAR, near), reserved(2**33 + DIM)
    index, rows, counts, bags = group_of(FAR)
    features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 0, 2**33]])
    ops.group_embedding_bag_([out], [far], index, rows, counts, bags, features)
    expected = ops.embedding_bag(near, torch.arange(5), bags.long())
    assert same_bits(torch.stack([out[:DIM], out[-DIM:]]), expected)


def test_gradients_that_are_written(engine):
    grad, out = randn(2 * DIM), reserved(ROWS * DIM)
    index, rows, counts, bags = group_of(FAR)
    features = torch.tensor([[0, 0, 0, 2, 0, 9, 0, 0, DIM]])
    ops.group_embedding_bag_backward_at_(
        out, [DIM], [grad], [DIM], index, rows, counts, bags, features, [], None
    )
    assert same_bits(out.view(ROWS, DIM)[FAR], grad.view(2, DIM)[[0, 0, 1, 1, 1]])


def test_scores_that_are_written(engine):
    scores = reserved(2**31 - 1, dtype=torch.int64)
    rows = torch.tensor([7, 2**29, 2**31 - 2, 2**31 - 3], dtype=torch.int32)
    index, bags = torch.tensor([0, 1, 2, 1], dtype=torch.int32), torch.tensor([0, 4]).int()
    features = torch.tensor([[0, 0, 0, 1, 0, 9, 0, 0, 1]])
    policies, clocks = torch.tensor([[2, 0]]), [torch.tensor([5])]
    ops.group_touch_([scores], index, rows, torch.tensor([3]), bags, features, policies, clocks)
    expected = [2**32 + 5, 2 * 2**32 + 5, 2**32 + 5, 0]
    assert scores[rows.long()].tolist() == expected


# ---- launches that are checked, but not executed ----

MOST = 2**31 - 1  # number of keys or entries of a call


def wide_bags(bags):
    """Return arguments of the ops that find keys: MOST keys of one source, cut into bags."""
    keys = reserved(MOST, dtype=torch.int64)
    offsets = torch.empty(0, dtype=torch.int64)
    if bags < MOST:
        offsets = torch.tensor([0, *[MOST] * bags])
    combiner = 3 if bags == MOST else 1
    features = torch.tensor([[0, 0, 0, bags, combiner, MOST, 0, 0, DIM]])
    return [keys], [offsets], features


def hash_table(buckets=2**29):
    """Return buckets, hash seed and size of a table."""
    return [reserved(buckets, 8, dtype=torch.int64)], [torch.tensor([3])], [torch.tensor([0])]


@pytest.mark.parametrize("bags", [1, 300, MOST])
def test_most_keys_of_many_tables(bags):
    buckets, seed, size = hash_table()
    weight, grad = reserved(MOST, DIM), reserved(bags * DIM)
    tables = torch.tensor([[0, MOST, 1]])
    initial = [torch.tensor([1])], tables, torch.tensor([[1, -0.5, 0.5]], dtype=torch.float64)
    asked = wide_bags(bags)
    of_bags = reserved(bags * DIM)
    with counted(plan=True) as counts:
        OPS.group_find(buckets, seed, tables, *asked)
        found = OPS.group_find_or_insert_(buckets, seed, size, [weight], *initial, *asked, [])
        rows, index, number, starts, key_starts = found
        given = starts, asked[2], [], key_starts
        OPS.group_embedding_bag_([of_bags], [weight], index, rows, number, *given, [], [], None)
        OPS.group_embedding_bag_backward([grad], [DIM], index, rows, number, *given)
        out = reserved(MOST, DIM).view(-1)
        OPS.group_embedding_bag_backward_at_(out, [DIM], [grad], [DIM], index, rows, number, *given)
        states, step = [reserved(MOST, DIM), reserved(MOST, DIM)], torch.tensor(3)
        rule, settings, _ = CASES["lazy adam"]
        OPS.group_embedding_bag_update_(
            [grad], index, rows, number, *given, [weight], states, [], [step], rule, settings
        )
        policies, clocks, occurrences = torch.tensor([[2, 9]]), [torch.tensor([3])], asked[0][0]
        scores = [reserved(MOST, dtype=torch.int64)]
        touched = index, rows, number, *given[:2], policies, clocks
        for counted_entries in (None, occurrences):
            OPS.group_touch_(scores, *touched, counted_entries)
        for distinct in (True, False):
            OPS.group_bucketize([], [-1], [-1], *asked, 8, distinct)
    assert counts.sum().kernels > 40


def test_most_keys_of_one_table():
    buckets, seed, size = hash_table()
    keys, weight = reserved(MOST, dtype=torch.int64), reserved(MOST, DIM)
    with counted(plan=True) as counts:
        OPS.hash_table_find(*buckets, *seed, keys)
        OPS.hash_table_find_or_insert_(*buckets, *seed, *size, keys, MOST)
        OPS.hash_table_renumber_(*buckets, *seed, reserved(MOST, dtype=torch.int32))
        OPS.unique_padded(keys)
        OPS.bucketize(keys, 8)
        OPS.gather_rows(weight, keys)
        OPS.init_rows_(weight, keys, keys, None, 0, 1, 0.0, 1.0)
        OPS.unsorted_segment_sum(weight, keys, MOST)
        for offsets in (torch.tensor([0, MOST]), keys):
            OPS.embedding_bag(weight, keys, offsets, 1)
            OPS.embedding_bag_backward(weight[: len(offsets) - 1], keys, offsets, 1, None, MOST)
        states, step = [reserved(MOST, DIM), reserved(MOST, DIM)], torch.tensor(3)
        rule, settings, _ = CASES["lazy adam"]
        grad = reserved(MOST, DIM)
        OPS.update_rows_([weight], states, [], [keys], [grad], [step], rule, settings)
    assert counts.sum().kernels > 25


def test_more_blocks_than_a_device_has():
    with counted(plan=True), pytest.raises(RuntimeError, match="gather_rows: a grid"):
        OPS.gather_rows(reserved(4, 128), reserved(2**36, dtype=torch.int64))
