"""sparsekit.ops.group_drop_lowest_ equals the ops that it stands for, one after another."""

import random

import pytest
import simt
import torch
from conftest import assert_same_bits_for_any_threads, generator
from reference import groups as reference

from sparsekit import HashTable, ops
from sparsekit.ops.group_touch import ScorePolicy


class Tables:
    """Hash tables with keys, rows of several dtypes, and lists of row numbers.

    Args:
        sizes: number of keys of each table.
        seed: seed of everything that is drawn.
        count: number of rows to drop, given the number of keys; drawn if None.
    """

    def __init__(self, sizes, seed, count=None):
        draw, made = random.Random(seed), generator(seed)

        def numbers(most, n):
            return torch.randint(0, most, (n,), generator=made)

        self.tables = [HashTable(n + 3, load_factor=0.9) for n in sizes]
        self.tensors, self.initial, self.lists, rows = [], [], [], []
        for table, n in zip(self.tables, sizes, strict=True):
            table.hash_seed.fill_(seed)
            table.find_or_insert(torch.randint(-(2**63), 2**63 - 1, (n,), generator=made))
            policy = draw.choice((ScorePolicy.lru, ScorePolicy.lfu))
            scores = numbers(draw.choice((1, 3, 2**31)), n + 3)
            if policy == ScorePolicy.lfu:
                scores = scores << 32 | numbers(100, n + 3)
            wide = torch.randn(n + 3, 2, 5, generator=made)
            own = [scores, wide[:, 1], torch.randn(n + 3, generator=made).double()]
            self.tensors += own[: draw.choice((1, 3))]
            lists = [numbers(n + 9, draw.choice((0, n // 3, n))).int() - 4 for _ in range(3)]
            lists = lists[: draw.choice((0, 2, 3))]
            self.lists += lists
            many = draw.choice((0, 1, n // 20, n // 2, n + 5)) if count is None else count(n)
            of_table = len(self.tensors) - len(self.initial)
            self.initial += [torch.tensor(7).to(x.dtype) for x in self.tensors[-of_table:]]
            pinned = draw.randint(0, len(lists))
            rows.append([policy, draw.choice((0, 7)), 90, many, of_table, len(lists), pinned])
        self.rows = torch.tensor(rows)

    def arguments(self):
        """Return the arguments of the op."""
        names = "buckets", "hash_seed", "size"
        of_tables = [[getattr(table, name) for table in self.tables] for name in names]
        return *of_tables, self.tensors, self.initial, self.lists, self.rows

    def state(self):
        """Return a copy of everything that the op may change, keys in order of row for buckets."""
        return [
            *(self.keys_of(table) for table in self.tables),
            *(x.clone() for x in (*self.tensors, *self.lists)),
        ]

    @staticmethod
    def keys_of(table):
        """Return the key of each row; the reference does not put buckets in order."""
        rows = table.buckets.view(torch.int32)[:, 10:15]
        order = rows[rows >= 0].argsort()
        assert rows[rows >= 0][order].tolist() == list(range(len(table)))
        return table.buckets[:, :5][rows >= 0][order]


def assert_equal(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("seed", range(60))
def test_equals_the_reference(seed):
    sizes = random.Random(seed).choices((0, 1, 5, 63, 64, 65, 300, 2000), k=4)
    given, expected = Tables(sizes, seed), Tables(sizes, seed)
    result = ops.group_drop_lowest_(*given.arguments())
    assert_equal(result, reference.group_drop_lowest_(*expected.arguments()))
    assert_equal(given.state(), expected.state())
    for table in given.tables:
        assert torch.equal(table.keys(), given.keys_of(table))  # refuses a damaged table


def test_buckets_are_those_of_the_single_ops():
    """Saved tables, and lookups on other engines, see the same bytes however rows are dropped."""
    given, expected = (Tables([5000], 3, count=lambda n: n // 3) for _ in range(2))
    (buckets,), (seed,), *_ = expected.arguments()
    given.lists, expected.lists = [], []
    given.rows[:, 5:] = expected.rows[:, 5:] = 0
    policy = expected.rows[0, :3].tolist()
    for _ in range(4):  # keys that have passed full buckets go as well
        size = len(expected.tables[0])
        gone, _, _ = ops.lowest_rows(
            expected.tensors[0], buckets, size, *policy, torch.empty(0).long(), 1000
        )
        new_rows = ops.compact_rows(gone, size)
        ops.hash_table_renumber_(buckets, seed, new_rows)
        ops.move_rows_(expected.tensors, new_rows, size - len(gone), expected.initial)
        expected.tables[0].size.sub_(len(gone))
        given.rows[0, 3] = 1000
        ops.group_drop_lowest_(*given.arguments())
        assert torch.equal(given.tables[0].buckets, buckets)
        assert_equal(given.state(), expected.state())


def test_bits_do_not_depend_on_threads():
    def compute():
        tables = Tables([90_000, 100, 40_000, 3], 5, count=lambda n: n // 7)
        dropped = ops.group_drop_lowest_(*tables.arguments())
        return [*dropped, *tables.state(), *(table.buckets for table in tables.tables)]

    assert_same_bits_for_any_threads(compute)


def test_a_table_without_keys_of_its_rows():
    """Only a damaged table has rows without a key; they are dropped all the same."""
    given = Tables([200], 1, count=lambda n: 50)
    ops.hash_table_clear_(given.tables[0].buckets)
    given.rows[:, 6] = 0
    dropped, _ = ops.group_drop_lowest_(*given.arguments())
    assert dropped.tolist() == [50]
    assert len(given.tables[0]) == 150
    assert (given.tables[0].buckets.view(torch.int32)[:, 10:15] == -1).all()


def test_tables_on_a_device_are_left_alone():
    given, expected = (Tables([200], 1, count=lambda n: 50) for _ in range(2))
    with simt.SimtMode():
        dropped, lost = ops.group_drop_lowest_(*given.arguments())
    assert dropped.tolist() == [-1]
    assert not lost.any()
    assert_equal(given.state(), expected.state())


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        (0, 0, "tables.0. must begin with 1 .lru. or 2 .lfu., got 0"),
        (0, 3, "tables.0. must begin with"),
        (1, -1, "halve_every of tables.0. must be >= 0, got -1"),
        (3, -1, "count of tables.0. must be >= 0, got -1"),
        (4, 0, "tensors must have 0 element"),
        (4, 4, "tables.0. has 4 of tensors, of which 3 are left"),
        (4, -1, "tables.0. has -1 of tensors"),
        (5, 1, "lists must have 1 element"),
        (5, 3, "tables.0. has 3 of lists, of which 2 are left"),
        (6, 3, "tables.0. has 3 pinned lists of 2"),
        (6, -1, "tables.0. has -1 pinned lists"),
    ],
)
def test_numbers_that_are_refused(column, value, message):
    given = _two_lists()
    given.rows[0, column] = value
    before = given.state()
    with pytest.raises(ValueError, match=f"^group_drop_lowest_: {message}"):
        ops.group_drop_lowest_(*given.arguments())
    assert_equal(given.state(), before)


def _two_lists():
    """Return a table with 50 keys, three tensors and two lists."""
    given = next(
        tables
        for seed in range(99)
        if len((tables := Tables([50], seed)).tensors) == 3 and len(tables.lists) == 2
    )
    given.rows[0, 3] = 5
    return given


@pytest.mark.parametrize(
    ("position", "place", "wrong", "message"),
    [
        (3, 0, torch.zeros(53, 1, dtype=torch.int64), "tensors.0., the scores of a table, must h"),
        (3, 0, torch.zeros(106, dtype=torch.int64)[::2], "tensors.0., the scores of a table, mus"),
        (3, 1, torch.zeros(49, 5), "tensors.1. must have at least 50 rows"),
        (3, 1, torch.zeros(5, 53).T, "rows of tensors.1. must be contiguous"),
        (3, 0, torch.zeros(53), "tensors.0. must have dtype Long, got Float"),
        (2, 0, torch.tensor([10**6]), "sizes.0. is 1000000, but the buckets have"),
        (2, 0, torch.tensor([-1]), "sizes.0. is -1"),
        (2, 0, torch.tensor([1, 2]), "sizes.0. must"),
        (4, 1, torch.zeros(2), "initial.1. must"),
        (5, 0, torch.zeros(8, dtype=torch.int32)[::2], "lists.0. must be contiguous"),
    ],
)
def test_tensors_that_are_refused(position, place, wrong, message):
    given = _two_lists()
    arguments = given.arguments()
    arguments[position][place] = wrong
    before = given.state()[1:]
    with pytest.raises(ValueError, match=f"^group_drop_lowest_: {message}"):
        ops.group_drop_lowest_(*arguments)
    assert_equal(given.state()[1:], before)


def test_versions_rise_only_if_something_is_written():
    given = _two_lists()
    arguments = given.arguments()
    written = [x for k in (0, 2, 3, 5) for x in arguments[k]]
    before = [x._version for x in written]
    given.rows[0, 3] = -1
    with pytest.raises(ValueError, match="count"):
        ops.group_drop_lowest_(*arguments)
    assert [x._version for x in written] == before
    given.rows[0, 3] = 5
    ops.group_drop_lowest_(*arguments)
    assert all(x._version > then for x, then in zip(written, before, strict=True))


def test_what_is_written_shares_no_memory():
    given = _two_lists()
    given.lists[1] = given.lists[0]
    with pytest.raises(ValueError, match="overlaps"):
        ops.group_drop_lowest_(*given.arguments())


@pytest.mark.parametrize(
    ("position", "wrong", "message"),
    [
        (0, torch.zeros(9, 8, dtype=torch.int32), r"buckets\[0\] must be int64"),
        (5, torch.zeros(3, dtype=torch.int64), r"lists\[0\] must be int32"),
    ],
)
def test_a_wrong_dtype(position, wrong, message):
    arguments = _two_lists().arguments()
    arguments[position][0] = wrong
    with pytest.raises(TypeError, match=f"^group_drop_lowest_: {message}"):
        ops.group_drop_lowest_(*arguments)
