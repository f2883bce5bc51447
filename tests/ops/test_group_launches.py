"""The ops on many tables launch no more kernels for 500 tables than for a few."""

import pytest
import torch
from conftest import same_bits
from simt_counts import Counts, Runner, counted

from sparsekit import ops
from sparsekit.ops._group import split_by_table

from .group_bags import backward, backward_at, places_for, pool
from .groups import NO_LIMIT, Group, Source
from .test_group_update import tables_of, update

needs_bytes = pytest.mark.skipif(
    not Runner().sees_bytes(), reason="the host runner of a sanitizer does not see plain accesses"
)


def batch_of(tables, bags, nnz, dims=(128,), keys=1000):
    """Return a group of tables, each with its own source."""
    dims = [dims[t % len(dims)] for t in range(tables)]
    group = Group(torch.float32, dims, [keys] * tables, [True] * tables, [1] * tables)
    random = torch.Generator().manual_seed(0)
    for t in range(tables):
        asked = torch.randint(keys, (bags * nnz,), generator=random)
        offsets = torch.arange(bags + 1) * nnz if nnz > 1 else torch.empty(0).long()
        group.sources.append(Source(asked, offsets, torch.empty(0)))
        group.ask(t, t, 0, bags, "mean" if t % 2 else "sum")
        group.features[t][5] = nnz
    return group


def step_of(group, fused=True) -> Counts:
    """Return the launch counts of a second step, in which all keys are known."""
    outs, tables = group.outs(), tables_of(group, "lazy adam")
    for _ in range(2):
        with counted() as counts:
            found = group.find_or_insert()
            pool(group, outs, found)
            if fused:
                update(group, outs, found, tables)
            else:
                backward(group, outs, found)
    return counts


@pytest.mark.parametrize("dims", [(16,), (16, 1, 128, 20)])
@pytest.mark.parametrize("tables", [1, 26, 500])
def test_launches_and_waits_of_a_step(tables, dims):
    counts = step_of(batch_of(tables, 4, 3, dims)).sum()
    # Counting the steps takes one more. So few entries have sort keys of at most two digits.
    assert counts.operations == {1: 15, 26: 16, 500: 16}[tables] + (len(dims) > 1 < tables)
    assert counts.library == 0
    assert counts.torch == 0
    assert counts.waits == 1  # to learn whether tables are full


def test_the_number_of_tables_does_not_matter():
    # All have sort keys of two digits, each of which takes a launch.
    few, *more = (step_of(batch_of(t, 6000 // t, 1, (16,))) for t in (26, 100, 250, 500))
    assert few.sum().operations == 17
    for each in more:
        assert each.sum().operations == 16  # such small tables take a level of sums less
    for each in (few, *more):
        of_pooling = each.sum("group_embedding_bag_", "group: descriptors").launches
        assert of_pooling == each.sum(name="group: descriptors").launches == 1


def test_larger_tables_take_more_levels_of_sums():
    sums = [
        step_of(batch_of(2, bags, 1)).sum("group_embedding_bag_update_", "group: sums").launches
        for bags in (64, 65, 64 * 32, 64 * 32 + 1)
    ]
    assert sums == [1, 2, 2, 3]


@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("tables", [1, 26, 500])
def test_launches_of_routing(tables, distinct):
    """Count the launches that sort keys by owner, and the launches that locate received vectors."""
    group, world_size = batch_of(tables, 4, 3, (16,)), 4
    for _ in range(2):
        with counted() as counts:
            results = group.bucketize(world_size, distinct)
    come = torch.zeros(tables, world_size, 2, dtype=torch.int64)
    come[:, :, 1] = results[1].T.cumsum(1)
    places, bags, features = results[4], results[5], group.asked[2]
    with counted() as of_rows:
        ops.group_exchange_rows(places, bags, features, come, [1] * tables)
    assert counts.sum().launches == (9 if distinct else 6)
    assert counts.sum().library == 1
    assert of_rows.sum().launches == 2
    for each in (counts, of_rows):
        assert each.sum().waits == each.sum().torch == 0


@pytest.mark.parametrize("tables", [1, 26, 500])
def test_launches_of_a_backward_to_given_places(tables):
    group = batch_of(tables, 4, 3, (16,))
    found, grads = group.find_or_insert(), group.outs()
    places = places_for(group, found, seed=0)
    with counted() as counts:
        backward_at(group, grads, found, *places)
    op = counts.sum("group_embedding_bag_backward_at_")
    described = counts.sum("group_embedding_bag_backward_at_", "group: descriptors").launches
    assert described <= 1
    assert op.launches - described in (5, 6)  # a launch for each 8 bits of the sort keys
    assert op.library == 0
    assert op.waits == op.torch == 0


@pytest.mark.parametrize("tables", [1, 26, 500])
def test_launches_without_an_optimizer(tables):
    counts = step_of(batch_of(tables, 4, 3, (16,)), fused=False).sum()
    assert counts.operations <= 45
    assert counts.waits == 2  # to learn whether tables are full, and how long the gradient is


def test_launches_of_an_evaluation():
    group = batch_of(26, 4, 3)
    outs = group.outs()
    with counted() as counts:
        pool(group, outs, group.find(), initial=True)
    assert counts.sum().launches <= 6
    assert counts.sum().waits == 0


def test_long_bags_are_looked_for_only_where_there_may_be_some():
    group = batch_of(3, 300, 2)
    short = step_of(group).sum("group_embedding_bag_").launches
    group.features[1][5] = NO_LIMIT
    assert step_of(group).sum("group_embedding_bag_").launches == short + 4


@needs_bytes
@pytest.mark.parametrize("tables", [26, 500])
def test_the_busiest_block_of_an_update(tables):
    """No block does much more than its share, although one table has 75% of the distinct rows."""
    rows, dim = 2000, 128
    own = [rows * 3 // 4, *[rows // 4 // (tables - 1)] * (tables - 1)]
    group = Group(torch.float32, [dim] * tables, own, [True] * tables, [1] * tables)
    for t, n in enumerate(own):
        group.sources.append(Source(torch.arange(n), torch.empty(0).long(), torch.empty(0)))
        group.ask(t, t, 0, n, "sum")
    update = step_of(group).sum("group_embedding_bag_update_", "update_rows")
    of_row = 7 * dim * 4  # the gradient is read; the weight and two states are read and written
    # The host runner limits an update to 32 blocks, plus one for each table.
    assert update.busiest <= 1.4 * rows / 32 * of_row


def atomics_to_enter(keys, tables=1):
    """Return the number of atomics that find first occurrences; each table gets all keys."""
    n = len(keys)
    group = Group(torch.float32, [1] * tables, [n] * tables, [True] * tables, [1] * tables)
    for t in range(tables):
        group.sources.append(Source(keys, torch.empty(0).long(), torch.empty(0)))
        group.ask(t, t, 0, n, "none")
    with counted() as counts:
        group.find_or_insert()
    return counts.sum("group_find_or_insert_", "group: enter").atomics


def test_equal_keys_of_a_warp_cost_one_atomic():
    n = 2048
    equal = torch.zeros(n, dtype=torch.int64)
    assert atomics_to_enter(equal) <= n // 32
    # Equal numbers in different tables are different keys.
    assert atomics_to_enter(equal[:48], tables=40) <= 40 * (48 // 32 + 2)
    # Each key claims a slot; a lost claim is repeated.
    assert n <= atomics_to_enter(torch.arange(n)) <= 1.15 * n


@needs_bytes
@pytest.mark.parametrize(("bags", "nnz", "most"), [(512, 1, 1.25), (128, 4, 1.3)])
def test_bytes_of_a_step(bags, nnz, most):
    """A step moves little more than each key, offset, vector, row and state once per use."""
    tables, dim = 26, 128
    group = batch_of(tables, bags, nnz)
    moved = step_of(group).sum().moved
    distinct = sum(len(source.keys.unique()) for source in group.sources)
    row = dim * 4
    of_keys = tables * (bags * nnz * 8 + (bags + 1) * 8 * (nnz > 1))
    floor = of_keys + 2 * tables * bags * row + distinct * 3 * 2 * row
    assert moved <= most * floor


@pytest.mark.parametrize("tables", [60, 700])
def test_groups_that_come_in_several_pieces(tables):
    """Results are right if table descriptors, of 140 bytes each, exceed the 32 KB of a launch."""
    group = batch_of(tables, 2, 2, (4, 3, 8))
    grads = [torch.full_like(out, i + 1) for i, out in enumerate(group.outs())]
    with counted():
        found = group.find_or_insert()
        outs = group.outs()
        pool(group, outs, found)
        rows, sums = backward(group, grads, found)
    weights = [weight.clone() for weight in group.weights]
    other = batch_of(tables, 2, 2, (4, 3, 8))
    expected = other.find_or_insert()  # runs on the CPU
    for one, two in zip(weights, other.weights, strict=True):
        torch.testing.assert_close(one, two)
    outs_of_cpu = other.outs()
    pool(other, outs_of_cpu, expected)
    for one, two in zip(outs, outs_of_cpu, strict=True):
        torch.testing.assert_close(one, two)
    rows_of_cpu, sums_of_cpu = backward(other, grads, expected)
    assert torch.equal(rows, rows_of_cpu)
    counts = found[2].tolist()
    for one, two in zip(
        split_by_table(group.dims, counts, rows, sums)[1],
        split_by_table(group.dims, counts, rows, sums_of_cpu)[1],
        strict=True,
    ):
        assert same_bits(one, two)
