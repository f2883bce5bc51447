"""sparsekit.ops.group_bucketize and group_exchange_rows equal the reference."""

import contextlib
import random

import pytest
import simt
import torch
from conftest import (
    INT64_MAX,
    INT64_MIN,
    KEY_EXTREMES,
    KEY_PATTERNS,
    assert_same_bits_for_any_threads,
    key_pattern,
)
from reference import groups as reference_group
from simt_counts import counted

from sparsekit import ops
from sparsekit.ops.bucketize import bucketize

from .groups import NO_LIMIT, Group, Source, random_group

NONE = torch.empty(0, dtype=torch.int64)
SEEDS = range(20)
WORLD_SIZES = (1, 2, 3, 8, 40)  # the last one exceeds kFewRanks


def first_entries(group):
    """Return the index of each table's first entry."""
    entry, first = 0, []
    for t in range(len(group.dims)):
        first.append(entry)
        entry += sum(group.keys_of(f) for f in group.features if f[0] == t)
    return first


def defined(group, results):
    """Return the specified parts of the results, with places split by table."""
    by_owner, counts, numbers, inverse, places, bags, key_starts = (r.cpu() for r in results)
    begin, keys = 0, []
    for count in counts.sum(1).tolist():
        keys.append(by_owner[begin : begin + count])
        begin += count
    own = [
        places[first : first + number]
        for first, number in zip(first_entries(group), numbers.tolist(), strict=True)
    ]
    num_bags = sum(feature[3] for feature in group.features)
    n = group.entries()
    return [*keys, counts, numbers, inverse[:n], *own, bags[: num_bags + 1], key_starts]


def check(group, world_size, distinct=True):
    results = group.bucketize(world_size, distinct)
    expected = group.bucketize(world_size, distinct, op=reference_group.group_bucketize)
    by_owner, counts, numbers, inverse, places, bags, _ = results
    n = sum(len(source.keys) for source in group.sources)
    assert by_owner.shape == (n,)
    assert inverse.shape == places.shape == (n,)
    assert bags.shape == (sum(source.bags for source in group.sources) + 1,)
    assert inverse.dtype == places.dtype == bags.dtype == torch.int32
    assert by_owner.dtype == counts.dtype == numbers.dtype == torch.int64
    each = zip(defined(group, results), defined(group, expected), strict=True)
    for one, other in each:
        assert torch.equal(one, other)
    return results


def come_for(counts, steps, seed):
    """Return the argument `come`, for vectors that are received in any order and with gaps."""
    draw = random.Random(seed)
    world_size, tables = counts.shape
    come = torch.zeros(tables, world_size, 2, dtype=torch.int64)
    pieces = [(t, r) for t in range(tables) for r in range(world_size)]
    draw.shuffle(pieces)
    at = 0
    for t, r in pieces:
        at += draw.randint(0, 9)
        come[t, r, 0] = at
        at += int(counts[r, t]) * steps[t]
    come[:, :, 1] = counts.cpu().T.cumsum(1)
    return come


def check_rows(group, results, seed):
    _, counts, numbers, _, places, bags, _ = results
    steps = [max(1, dim // 4) for dim in group.dims]
    come = come_for(counts, steps, seed)
    features = group.asked[2]
    rows = ops.group_exchange_rows(places, bags, features, come, steps)
    expected = reference_group.group_exchange_rows(places.cpu(), bags.cpu(), features, come, steps)
    assert rows.dtype == torch.int32
    assert rows.shape == places.shape
    for first, number in zip(first_entries(group), numbers.tolist(), strict=True):
        assert torch.equal(rows[first : first + number].cpu(), expected[first : first + number])


def check_all(group, world_size, distinct, seed):
    check_rows(group, check(group, world_size, distinct), seed)


def places_of(by_owner, counts, max_keys):
    """Return the keys for each rank and table, from places of a fixed size."""
    of_ranks = by_owner.cpu().view(len(counts), -1)
    pieces = [piece for rank in of_ranks for piece in rank.split(max_keys)]
    return [piece[:n] for piece, n in zip(pieces, counts.flatten().tolist(), strict=True)]


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", range(0, 20, 3))
def test_places_of_a_fixed_size(device, seed, world_size, distinct):
    group = random_group(seed, torch.float32, device)
    tight = group.bucketize(world_size, distinct)
    draw = random.Random(seed)
    max_keys = [max(1, n + draw.choice([0, 0, 3])) for n in tight[1].amax(0).tolist()]
    results = group.bucketize(world_size, distinct, max_keys=max_keys)
    expected = group.bucketize(
        world_size, distinct, op=reference_group.group_bucketize, max_keys=max_keys
    )
    by_owner, counts, numbers, *_ = results
    assert len(by_owner) == world_size * sum(max_keys)
    each = zip(
        (*places_of(by_owner, counts, max_keys), *defined(group, [NONE, *results[1:]])),
        (*places_of(expected[0], counts, max_keys), *defined(group, [NONE, *expected[1:]])),
        strict=True,
    )
    for one, other in each:
        assert torch.equal(one, other)

    # Also compare the rows of vectors that are received in places of this fixed size.
    features, steps = group.asked[2], [1] * len(max_keys)
    come = torch.zeros(len(max_keys), world_size, 2, dtype=torch.int64)
    come[:, :, 1] = torch.arange(1, world_size + 1) * torch.tensor(max_keys)[:, None]
    rows = ops.group_exchange_rows(results[4], results[5], features, come, steps, numbers)
    of_reference = reference_group.group_exchange_rows(
        expected[4], expected[5], features, come, steps, expected[2]
    )
    for first, number in zip(first_entries(group), numbers.tolist(), strict=True):
        entries = slice(first, first + number)
        assert torch.equal(rows[entries].cpu(), of_reference[entries])


def test_more_keys_than_places(device):
    group = Group(torch.float32, [4] * 2, [9] * 2, [True] * 2, [1] * 2, device)
    for t, keys in enumerate(([4, 5, 6], [8, 2, 4, 6, 1])):
        group.sources.append(Source(torch.tensor(keys), NONE, torch.empty(0)))
        group.ask(t, t, 0, len(keys), "sum")
    assert group.bucketize(2, max_keys=[2, 4])[0].tolist()[:6] == [4, 6, 8, 2, 4, 6]
    message = r"a rank owns more keys of table 1 than max_keys_per_rank\[1\] = 3"
    with pytest.raises(ValueError, match=message):
        group.bucketize(2, max_keys=[2, 3])


@pytest.mark.parametrize(
    ("max_keys", "message"),
    [
        ([1], r"max_keys_per_rank must have 2 element\(s\), got 1"),
        ([1, 0], r"max_keys_per_rank\[1\] must be at least 1, .* got 0"),
        ([2**29] * 2, r"max_keys_per_rank\[1\] must .* sum of all below 2\^31, got 536870912"),
    ],
)
def test_numbers_of_places_that_are_refused(device, max_keys, message):
    group = Group(torch.float32, [4] * 2, [9] * 2, [True] * 2, [1] * 2, device)
    with pytest.raises(ValueError, match=message):
        group.bucketize(2, max_keys=max_keys)


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("seed", SEEDS)
def test_equals_the_reference(device, seed, world_size, distinct):
    group = random_group(seed, torch.float32, device)
    check_all(group, world_size, distinct, seed)


def one_table(device, keys, offsets=NONE, *, hashed=True, capacity=100, features=1):
    group = Group(torch.float32, [4], [capacity], [hashed], [1], device)
    group.sources.append(Source(torch.as_tensor(keys), torch.as_tensor(offsets), torch.empty(0)))
    if features:
        group.ask(0, 0, 0, group.sources[0].bags, "sum")
    return group


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("pattern", KEY_PATTERNS)
def test_any_keys(device, pattern, dtype):
    group = one_table(device, key_pattern(pattern, 3000, dtype))
    for world_size in (1, 7, 2048):
        results = check(group, world_size)
        # A group of one table gives the results of the ops for one table.
        keys, inverse, _ = ops.unique(group.asked[0][0].long())
        by_owner, counts, _ = bucketize(keys, world_size)
        assert torch.equal(results[0][: len(keys)], by_owner)
        assert torch.equal(results[1][:, 0], counts)
        assert torch.equal(results[3].long(), inverse)


def test_keys_of_all_bits(device):
    keys = torch.tensor(KEY_EXTREMES).repeat(3)
    results = check(one_table(device, keys), 3)
    assert results[2].tolist() == [4]


def test_large_and_small_tables(device):
    group = Group(torch.float32, [3] * 4, [60_000] * 4, [True] * 4, [1] * 4, device)
    for t, n in enumerate((50_000, 10, 3000, 40_000)):
        keys = key_pattern("half on one" if t else "distinct", n)
        group.sources.append(Source(keys, NONE, torch.empty(0)))
        group.ask(t, t, 0, n, "none")
    # Two sources request keys of the last table; one source has int32 keys.
    keys = key_pattern("few", 20_000, torch.int32)
    group.sources.append(Source(keys, NONE, torch.empty(0)))
    group.ask(3, 4, 0, 20_000, "none")
    check_all(group, 5, True, 0)
    check_all(group, 5, False, 0)


def test_same_bits_for_any_threads(device):
    group = random_group(3, torch.float32, device, most_keys=20_000)
    assert_same_bits_for_any_threads(lambda: defined(group, group.bucketize(4)))


def test_no_tables_and_no_keys(device):
    group = Group(torch.float32, [], [], [], [], device)
    shapes = [tuple(result.shape) for result in group.bucketize(3)]
    assert shapes == [(0,), (3, 0), (0,), (0,), (0,), (1,), (0,)]
    for features in (0, 1):
        group = one_table(device, NONE, features=features)
        results = check(group, 3)
        assert results[1].tolist() == [[0]] * 3
        assert results[2].tolist() == [0]
        check_rows(group, results, 0)


def test_a_table_that_nobody_asks(device):
    group = Group(torch.float32, [4] * 3, [9] * 3, [True] * 3, [1] * 3, device)
    group.sources.append(Source(torch.tensor([5, 6, 5, 7]), NONE, torch.empty(0)))
    group.ask(1, 0, 1, 2, "sum")
    results = check(group, 2)
    assert results[1].tolist() == [[0, 1, 0], [0, 1, 0]]
    check_rows(group, results, 0)


@pytest.mark.parametrize(
    ("offsets", "max_nnz", "message"),
    [
        ([1, 2, 3], NO_LIMIT, r"offsets\[0\] must rise .* element 0"),
        ([0, 2, 1, 3], NO_LIMIT, r"offsets\[0\] must rise .* element 2"),
        ([0, 2**63 - 1, -(2**63), 3], NO_LIMIT, r"offsets\[0\] must rise .* element 1"),
        ([0, 1, 2], NO_LIMIT, r"offsets\[0\] must rise .* element 2"),
        ([0, 0, 3], 2, "bag 1 of source 0 has more keys than its max_nnz=2"),
    ],
)
def test_bags_that_are_refused(device, offsets, max_nnz, message):
    group = one_table(device, [5, 6, 7], offsets)
    group.features[0][5] = max_nnz
    with pytest.raises(ValueError, match=f"group_bucketize: {message}"):
        group.bucketize(2)


@pytest.mark.parametrize("bad", [100, -1, 2**62, -(2**63)])
def test_keys_out_of_range(device, bad):
    message = rf"group_bucketize: keys\[0\]\[2\] is {bad}, which is no row"
    with pytest.raises(IndexError, match=message):
        one_table(device, [5, 99, bad, -7], hashed=False).bucketize(2)
    check(one_table(device, [5, 99, bad, -7], hashed=True), 2)


def test_a_range_is_of_its_table_alone(device):
    group = Group(torch.float32, [4] * 3, [9] * 3, [True, False, True], [1, 3, 1], device)
    for t, keys in enumerate(([-5, 2**40], [0, 26], [2**63 - 1, -1])):
        group.sources.append(Source(torch.tensor(keys), NONE, torch.empty(0)))
        group.ask(t, t, 0, 2, "sum")
    check(group, 2)
    group.sources[1].keys[1] = 27
    with pytest.raises(IndexError, match=r"keys\[1\]\[1\] is 27"):
        group.bucketize(2)


def arguments_of(device):
    keys, offsets = torch.tensor([5, 6, 5]), torch.tensor([0, 1, 3])
    group = one_table(device, keys, offsets)
    return {
        "owners": [torch.zeros(65536, dtype=torch.int16, device=device)],
        "maps": [-1],
        "ends": [-1],
        "keys": group.asked[0],
        "offsets": group.asked[1],
        "features": group.asked[2],
        "world_size": 2,
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"world_size": 0}, r"world_size must be in \[1, 2048\], got 0"),
        ({"world_size": 2049}, r"world_size must be in \[1, 2048\], got 2049"),
        ({"maps": [1]}, r"maps\[0\] is 1, but owners has 1 element"),
        ({"maps": [-2]}, r"maps\[0\] is -2"),
        ({"maps": [-1, -1]}, "ends must have 2 element"),
        ({"maps": [], "ends": []}, r"table of features\[0\] is 0"),
        ({"ends": []}, r"ends must have 1 element\(s\), got 0"),
        ({"ends": [-2]}, r"ends\[0\] is -2, but must be at least -1"),
        ({"ends": [-(2**63)]}, r"ends\[0\] is -9223372036854775808"),
        ({"owners": [torch.zeros(65535, dtype=torch.int16)]}, r"owners\[0\] must have size 65536"),
        ({"owners": [torch.zeros(2, 8, dtype=torch.int16)]}, r"owners\[0\] must have 1 dimension"),
        (
            {"owners": [torch.zeros(2**17, dtype=torch.int16)[::2]]},
            r"owners\[0\] must be contiguous",
        ),
        ({"offsets": []}, "offsets must have 1 element"),
    ],
)
def test_arguments_that_are_refused(device, changed, message):
    arguments = arguments_of(device) | changed
    if "owners" in changed:
        arguments["owners"] = [owners.to(device) for owners in changed["owners"]]
        strided = changed["owners"][0]
        if not strided.is_contiguous():
            arguments["owners"] = [strided.new_zeros(2**17, device=device)[::2]]
    with pytest.raises(ValueError, match=f"group_bucketize: .*{message}"):
        ops.group_bucketize(**arguments)


@pytest.mark.parametrize("wrong", ["owners", "keys", "offsets", "features"])
def test_dtypes_that_are_refused(device, wrong):
    arguments = arguments_of(device)
    value = arguments[wrong]
    arguments[wrong] = value.half() if isinstance(value, torch.Tensor) else [value[0].half()]
    with pytest.raises(TypeError, match=rf"group_bucketize: {wrong}(\[0\])? must be"):
        ops.group_bucketize(**arguments)


def test_a_product_of_tables_and_ranks_that_is_too_large(device):
    tables = 2**31 // 2048
    arguments = arguments_of(device) | {"world_size": 2048, "maps": [-1] * tables}
    with pytest.raises(ValueError, match="at most 2\\^31 - 1 of both together"):
        ops.group_bucketize(**arguments | {"ends": [-1] * tables})


def mapped(device, elements, world_size=3):
    """Bucketize keys of two tables; the map of owners of the second table has these elements."""
    group = Group(torch.float32, [4] * 2, [9] * 2, [True] * 2, [1] * 2, device)
    for t in range(2):
        group.sources.append(Source(torch.tensor([5, -6, 5, 2**40]), NONE, torch.empty(0)))
        group.ask(t, t, 0, 4, "sum")
    owners = torch.as_tensor(elements, dtype=torch.int16).expand(65536).contiguous().to(device)
    return ops.group_bucketize([owners], [-1, 0], [-1, -1], *group.asked, world_size)


def test_a_map_says_who_owns_keys(device):
    _, counts, numbers, *_ = mapped(device, 2)
    assert counts[:, 1].tolist() == [0, 0, 3]
    assert counts[:, 0].sum() == 3
    assert numbers.tolist() == [3, 3]


@pytest.mark.parametrize("bad", [3, -1, 2**15 - 1, -(2**15)])
def test_maps_that_name_no_rank(device, bad):
    message = r"owners\[0\], of table 1, has an element that is not in \[0, world_size = 3\)"
    with pytest.raises(ValueError, match=message):
        mapped(device, bad)


def rows_of(device):
    """Return arguments of group_exchange_rows: two tables with 3 and 2 keys, two ranks."""
    features = [[0, 0, 0, 2, 0, NO_LIMIT, 0, 0, 4], [1, 1, 0, 1, 0, NO_LIMIT, 0, 0, 4]]
    return {
        "places": torch.tensor([2, 0, 1, 9, 1, 0], dtype=torch.int32, device=device),
        "bags": torch.tensor([0, 1, 4, 6], dtype=torch.int32, device=device),
        "features": torch.tensor(features),
        "come": torch.tensor([[[10, 1], [40, 3]], [[0, 0], [7, 2]]]),
        "steps": [5, 1],
    }


def test_rows(device):
    rows = ops.group_exchange_rows(**rows_of(device))
    assert rows[:3].tolist() == [45, 10, 40]
    assert rows[4:].tolist() == [8, 7]


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("entry", [0, 2, 4, 5])
def test_places_that_are_refused(device, entry, bad):
    arguments = rows_of(device)
    arguments["places"][entry] = bad
    with pytest.raises(IndexError, match=rf"places\[{entry}\] is {bad}, which is none of its"):
        ops.group_exchange_rows(**arguments)


def test_rows_of_fewer_keys_than_vectors(device):
    arguments = rows_of(device)
    arguments["places"][:4] = torch.tensor([2, 0, 9, -1])
    numbers = torch.tensor([2, 1], device=device)
    rows = ops.group_exchange_rows(**arguments, numbers=numbers)
    assert rows[:2].tolist() == [45, 10]
    assert rows[4].item() == 8
    with pytest.raises(IndexError, match=r"places\[2\] is 9"):
        ops.group_exchange_rows(**arguments, numbers=numbers + 1)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ([5, 2], "table 0 has 4 entries, but 5 keys"),
        ([3, INT64_MAX], "table 1 has 2 entries, but 9223372036854775807 keys"),
        ([3], "numbers must have size 2"),
    ],
)
def test_numbers_of_keys_that_are_refused(device, numbers, message):
    with pytest.raises(ValueError, match=f"group_exchange_rows: {message}"):
        ops.group_exchange_rows(**rows_of(device), numbers=torch.tensor(numbers, device=device))


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        ([0, 1, 4, 7], r"bags must rise to at most len\(places\) = 6, but those of table 1"),
        ([-1, 1, 4, 6], "bags must rise .* table 0 go from -1 to 4"),
        ([0, 1, 4, 3], "bags must rise .* table 1 go from 4 to 3"),
        ([0, 1, 2**31 - 1, 6], "bags must rise .* table 0"),
        ([0, 1, -(2**31), 6], "bags must rise .* table 0"),
        ([0, 1, 2, 6], "table 0 has 2 entries, but 3 keys"),
        ([0, 1, 5, 6], "table 1 has 1 entries, but 2 keys"),
        ([0, 1, 4], "bags has 3 elements, but features have 3 bags"),
    ],
)
def test_bags_of_rows_that_are_refused(device, bags, message):
    arguments = rows_of(device)
    arguments["bags"] = torch.tensor(bags, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=f"group_exchange_rows: {message}"):
        ops.group_exchange_rows(**arguments)


@pytest.mark.parametrize(
    ("come", "message"),
    [
        ([[10, 3], [40, 1]], r"come\[0\]\[1\] is 40 and 1, after 3"),
        ([[10, -1], [40, 3]], r"come\[0\]\[0\] is 10 and -1, after 0"),
        ([[10, 1], [40, 7]], r"come\[0\]\[1\] is 40 and 7, after 1"),
        ([[10, 1], [40, 2**62]], r"come\[0\]\[1\]"),
        ([[-1, 1], [40, 3]], r"come\[0\]\[0\] is -1 and 1"),
        ([[2**31, 1], [40, 3]], r"come\[0\]\[0\] is 2147483648 and 1"),
        ([[10, 1], [2**31 - 10, 3]], r"come\[0\]\[1\] is 2147483638 and 3"),
        ([[10, 1], [-(2**63), 3]], r"come\[0\]\[1\]"),
    ],
)
def test_parts_that_are_refused(device, come, message):
    arguments = rows_of(device)
    arguments["come"][0] = torch.tensor(come)
    with pytest.raises(ValueError, match=f"group_exchange_rows: {message}"):
        ops.group_exchange_rows(**arguments)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"steps": [5, 0]}, r"steps\[1\] must be in \[1, 2\^31\), got 0"),
        ({"steps": [2**31, 1]}, r"steps\[0\] must be in"),
        ({"steps": [5]}, r"table of features\[1\] is 1"),
        ({"steps": [5, 1, 1]}, r"come must have shape \[3, world_size, 2\]"),
        ({"come": torch.zeros(2, 0, 2).long()}, r"come must have shape \[2, world_size, 2\]"),
        ({"come": torch.zeros(2, 2).long()}, "come must have 3 dimension"),
        ({"come": torch.zeros(2, 2, 3).long()}, "come must have shape"),
        ({"come": torch.zeros(2, 2049, 2).long()}, "come must have shape"),
    ],
)
def test_arguments_of_rows_that_are_refused(device, changed, message):
    with pytest.raises(ValueError, match=f"group_exchange_rows: {message}"):
        ops.group_exchange_rows(**rows_of(device) | changed)


@pytest.mark.parametrize("wrong", ["places", "bags", "features", "come"])
def test_dtypes_of_rows_that_are_refused(device, wrong):
    arguments = rows_of(device)
    arguments[wrong] = arguments[wrong].half()
    with pytest.raises(TypeError, match=f"group_exchange_rows: {wrong} must be"):
        ops.group_exchange_rows(**arguments)


def reports(message):
    """Check that the next op with checks on raises the error of the earlier call."""
    left_over = f"{message} was out of range in an earlier call"
    with pytest.raises(IndexError, match=left_over), simt.SimtMode():
        ops.unique(torch.zeros(1).long())


@pytest.mark.parametrize("seed", range(5))
def test_nothing_but_results_is_written_without_checks(seed):
    """On a device, invalid offsets, places or bags cause no write outside the results."""
    draw = random.Random(seed)
    group = random_group(seed, torch.float32, torch.device("cpu"))
    group.sources.append(Source(torch.arange(5), torch.tensor([0, 2, 4, 5]), torch.empty(0)))
    group.ask(len(group.dims) - 1, len(group.sources) - 1, 0, 3, "sum")
    edges = (INT64_MIN, -1, 0, 1, 4, 6, 2**31, INT64_MAX)
    for _ in range(5):
        offsets = torch.tensor([9, *(draw.choice(edges) for _ in range(3))])
        group.sources[-1].offsets = offsets
        with counted():
            results = group.bucketize(3, draw.random() < 0.5)
        assert results[1].sum() == results[2].sum() <= len(results[4])
        reports(r"offsets\[\d+\]")
    narrow = [number for number in edges if abs(number) < 2**31] + [-(2**31), 2**31 - 1]
    for _ in range(20):
        arguments = rows_of("cpu")
        place = draw.randrange(6)
        arguments["places"][place] = draw.choice(narrow)
        arguments["bags"][draw.randrange(4)] = draw.choice(narrow)
        if draw.random() < 0.5:
            arguments["numbers"] = torch.tensor([draw.choice(edges), 2])
        with counted():
            rows = ops.group_exchange_rows(**arguments)
        assert len(rows) == 6
        with contextlib.suppress(IndexError), simt.SimtMode():
            ops.unique(torch.zeros(1).long())


def test_reports_without_checks():
    arguments = rows_of("cpu")
    arguments["places"][2] = 3
    with counted():
        rows = ops.group_exchange_rows(**arguments)
    assert rows[:3].tolist() == [45, 10, -1]
    reports(r"group_exchange_rows: places\[2\]")
    arguments = rows_of("cpu")
    arguments["bags"][3] = 5
    with counted():
        ops.group_exchange_rows(**arguments)
    reports(r"group_exchange_rows: come\[1\]")
