"""sparsekit.ops.group_find and group_find_or_insert_ equal the reference and the single ops."""

import pytest
import torch
from conftest import ROW_DTYPES, assert_same_bits_for_any_threads, key_pattern, same_bits
from reference import groups as reference_group
from reference import ops as reference

from sparsekit import ops

from .groups import NO_LIMIT, Group, Source, random_group

NONE = torch.empty(0, dtype=torch.int64)
SEEDS = range(20)


def one_table(device, keys, offsets=NONE, *, bags=None, capacity=100, dim=4, hashed=True, **other):
    """Return a group of one table and one source."""
    group = Group(torch.float32, [dim], [capacity], [hashed], [1], device)
    keys = torch.as_tensor(keys)
    group.sources.append(Source(keys, torch.as_tensor(offsets), torch.empty(0)))
    group.ask(0, 0, 0, group.sources[0].bags if bags is None else bags, "sum")
    if "max_nnz" in other:
        group.features[0][5] = other["max_nnz"]
    return group


def tables_of(group):
    states = [buffer.clone() for table in group.hash_tables for buffer in table.buffers()]
    return states + [weight.clone() for weight in group.weights]


def check(group):
    """Check two calls of group_find_or_insert_ and one of group_find."""
    plain_weights = [weight.cpu().clone() for weight in group.weights]
    seeds = [seed.cpu() for seed in group.seeds]
    keys, offsets, features = group.asked
    asked = [key.cpu() for key in keys], [offset.cpu() for offset in offsets], features
    n = group.entries()
    num_bags = sum(feature[3] for feature in group.features)

    def check_found():
        expected = reference_group.group_find(group.plain_tables, group.tables, *asked)
        rows, bags, key_starts = group.find()
        assert rows.dtype == torch.int32
        assert torch.equal(rows[:n].cpu(), expected[0][:n])
        assert len(bags) == sum(source.bags for source in group.sources) + 1
        assert torch.equal(bags[: num_bags + 1].cpu(), expected[1])
        assert torch.equal(key_starts.cpu(), expected[2])

    check_found()
    for _ in range(2):
        rows, inverse, counts, bags, key_starts = group.find_or_insert()
        expected = reference_group.group_find_or_insert_(
            group.plain_tables, plain_weights, seeds, group.tables, group.initializers, *asked
        )
        assert torch.equal(counts.cpu(), expected[2])
        assert torch.equal(inverse[:n].cpu(), expected[1][:n])
        assert torch.equal(bags[: num_bags + 1].cpu(), expected[3])
        assert torch.equal(key_starts.cpu(), expected[4])
        entry = 0
        for t, count in enumerate(counts.tolist()):
            own = slice(entry, entry + count)
            assert torch.equal(rows[own].cpu(), expected[0][own])
            entry += sum(group.keys_of(f) for f in group.features if f[0] == t)
        for table, plain in zip(group.hash_tables, group.plain_tables, strict=True):
            assert torch.equal(table.keys().cpu(), plain.keys())
        for weight, plain in zip(group.weights, plain_weights, strict=True):
            torch.testing.assert_close(weight.cpu(), plain, rtol=1e-6, atol=1e-7)
    check_found()


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(device, dtype, seed):
    check(random_group(seed, dtype, device))


def test_large_and_small_tables(device, backend):
    group = Group(torch.float32, [3] * 4, [60_000] * 4, [True] * 4, [1] * 4, device)
    many = 40_000 if backend == "cpu" else 8_000
    for t, n in enumerate((many + 10_000, 10, 3000, many)):
        keys = key_pattern("half on one" if t else "distinct", n)
        group.sources.append(Source(keys, NONE, torch.empty(0)))
        group.ask(t, t, 0, n, "none")
    # Two sources request keys of the last table; one source has int32 keys.
    keys = key_pattern("few", many // 2, torch.int32)
    group.sources.append(Source(keys, NONE, torch.empty(0)))
    group.ask(3, 4, 0, many // 2, "none")
    check(group)


def test_bits_are_those_of_the_single_ops_for_any_threads(device):
    def compute():
        group = random_group(3, torch.float32, device, most_keys=20_000)
        _, inverse, counts, *_ = group.find_or_insert()
        n = group.entries()
        found = group.find()[0][:n]
        return [inverse[:n], counts, found, *group.weights]

    assert_same_bits_for_any_threads(compute)
    group = random_group(5, torch.float32, device)
    group.find_or_insert()
    for t, table in enumerate(group.hash_tables):
        own = [i for i, hashed in enumerate(group.hashed) if hashed][t]
        code, a, b = group.initializers[own].tolist()
        weight = group.weights[own].clone()
        keys = table.keys()
        name = list(ops.init_rows.DISTRIBUTIONS)[int(code)]
        ops.init_rows_(
            weight, keys, table.find(keys), seed=int(group.seeds[own]), distribution=name, a=a, b=b
        )
        assert same_bits(weight, group.weights[own])


def refused(group, error, match, call=None):
    """Check that the call raises the error and changes no table."""
    before = tables_of(group)
    with pytest.raises(error, match=match):
        (call or group.find_or_insert)()
    for now, then in zip(tables_of(group), before, strict=True):
        assert same_bits(now, then)


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize(
    ("offsets", "max_nnz", "message"),
    [
        (
            [1, 2, 3],
            NO_LIMIT,
            r"offsets\[0\] must rise from 0 to len\(keys\[0\]\) = 3, .* element 0",
        ),
        ([0, 2, 1, 3], NO_LIMIT, r"offsets\[0\] must rise .* element 2"),
        ([0, 2, 2**62, 3], NO_LIMIT, r"offsets\[0\] must rise .* element 2"),
        ([0, 2**63 - 1, -(2**63), 3], NO_LIMIT, r"offsets\[0\] must rise .* element 1"),
        ([0, 1, 2], NO_LIMIT, r"offsets\[0\] must rise .* element 2"),
        ([0, -1, 3], NO_LIMIT, r"offsets\[0\] must rise .* element 1"),
        ([0, 0, 3], 2, "bag 1 of source 0 has more keys than its max_nnz=2"),
        ([0, 1, 3], 0, "bag 0 of source 0 has more keys than its max_nnz=0"),
    ],
)
def test_bags_that_are_refused(device, offsets, max_nnz, message, find):
    group = one_table(device, [5, 6, 7], offsets, max_nnz=max_nnz)
    refused(group, ValueError, message, group.find if find else None)
    rest = one_table(device, [5, 6, 7], offsets, bags=0, max_nnz=max_nnz)
    if max_nnz == NO_LIMIT:  # refused even if no feature takes these bags
        refused(rest, ValueError, "must rise")


@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("bad", [100, -1, 2**62])
def test_keys_that_are_no_rows(device, bad, find):
    group = one_table(device, [5, 99, bad, -7], hashed=False)
    message = rf"keys\[0\]\[2\] is {bad}, which is no row"
    refused(group, IndexError, message, group.find if find else None)


def test_a_full_table_is_as_it_was_and_the_others_go_on(device):
    group = Group(torch.float32, [2, 2], [3, 10], [True, True], [1, 1], device)
    for t in range(2):
        group.sources.append(Source(torch.tensor([1, 2, 1]), NONE, torch.empty(0)))
        group.ask(t, t, 0, 3, "none")
    group.find_or_insert()
    for source in group.sources:
        source.keys = torch.tensor([1, 7, 8])
    before = tables_of(group)
    with pytest.raises(RuntimeError, match="table 0 is full: 2 of its 3 rows are in use, and 2 of"):
        group.find_or_insert()
    after = tables_of(group)
    for i in (0, 2, 6):
        assert same_bits(after[i], before[i])
    assert group.hash_tables[1].keys().tolist() == [1, 2, 7, 8]
    expected = group.weights[1].cpu().clone()
    initial = {"seed": int(group.seeds[1]), "distribution": "uniform", "a": -0.5, "b": 0.5}
    keys, rows = torch.tensor([7, 8]), torch.tensor([2, 3])
    reference.init_rows_(expected, keys, rows, **initial)
    torch.testing.assert_close(group.weights[1].cpu(), expected)


def test_a_table_may_be_filled_to_its_last_row(device):
    group = one_table(device, [1, 2, 3], capacity=3)
    rows, _, counts, *_ = group.find_or_insert()
    assert (rows.tolist(), counts.tolist()) == ([0, 1, 2], [3])
    group.sources[0].keys = torch.tensor([3, 4, 1])
    refused(group, RuntimeError, "table 0 is full: 3 of its 3 rows are in use, and 1 of the keys")


FEATURES = {
    "table of features\\[0\\] is 1": {0: 1},
    "source of features\\[0\\] is -1": {1: -1},
    "first_bag of features\\[0\\] is 4": {2: 4},
    "bags of features\\[0\\] is 4": {3: 4},
    "bags of features\\[0\\] is -1": {3: -1},
    "combiner of features\\[0\\] is 4": {4: 4},
    "max_nnz of features\\[0\\] is -1": {5: -1},
}


@pytest.mark.parametrize("message", FEATURES)
def test_features_that_are_refused(device, message):
    group = one_table(device, [5, 6, 7])
    for column, value in FEATURES[message].items():
        group.features[0][column] = value
    refused(group, ValueError, message)
    refused(group, ValueError, message, group.find)


def test_a_bag_is_of_one_feature(device):
    group = one_table(device, [5, 6, 7])
    group.ask(0, 0, 2, 1, "sum")
    message = r"features\[0\] and features\[1\] have bags of source 0 in common"
    refused(group, ValueError, message)


def test_what_is_changed_shares_no_memory(device):
    group = Group(torch.float32, [4, 4], [10, 10], [True, True], [1, 1], device)
    group.sources.append(Source(torch.tensor([1, 2]), NONE, torch.empty(0)))
    group.ask(0, 0, 0, 2, "sum")
    group.weights[1] = group.weights[0]
    refused(group, ValueError, r"weights\[\d\] overlaps weights\[\d\] in memory")
    group.weights[1] = group.weights[0].clone()
    group.hash_tables[1].buckets = group.hash_tables[0].buckets[1:]
    refused(group, ValueError, r"buckets\[1\] overlaps buckets\[0\] in memory")


@pytest.mark.parametrize("wrong", ["keys", "offsets", "weights", "seeds", "tables", "features"])
def test_dtypes_that_are_refused(device, wrong):
    group = one_table(device, [5, 6, 7], [0, 1, 3])
    keys, offsets, features = group.asked
    table = group.hash_tables[0]
    arguments = {
        "buckets": [table.buckets],
        "hash_seeds": [table.hash_seed],
        "sizes": [table.size],
        "weights": group.weights,
        "seeds": group.seeds,
        "tables": group.tables,
        "initializers": group.initializers,
        "keys": keys,
        "offsets": offsets,
        "features": features,
    }
    value = arguments[wrong]
    arguments[wrong] = value.half() if isinstance(value, torch.Tensor) else [value[0].half()]
    with pytest.raises(TypeError, match=rf"group_find_or_insert_: {wrong}(\[0\])? must be"):
        ops.group_find_or_insert_(**arguments)
    assert len(table) == 0


def test_no_tables_and_no_keys(device):
    group = Group(torch.float32, [], [], [], [], device)
    results = [*group.find_or_insert(), *group.find()]
    assert [len(result) for result in results] == [0, 0, 0, 1, 0, 0, 1, 0]
    group = one_table(device, NONE)
    assert group.find_or_insert()[2].tolist() == [0]
