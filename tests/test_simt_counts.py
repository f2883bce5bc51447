"""Counts of launches, waits, atomics and bytes are right and equal those in docs/gpu-status.md."""

import re
import threading

import pytest
import simt
import torch
from simt_counts import Count, Runner, counted

import sparsekit
from sparsekit import ops
from tools import cuda_counts

KEYS = torch.tensor([5, 5, -1, 7, 5] * 20)
needs_bytes = pytest.mark.skipif(
    not Runner().sees_bytes(), reason="the host runner of a sanitizer does not see plain accesses"
)


def test_every_launch_and_wait_of_an_op():
    with counted() as counts:
        unique, _, _ = torch.ops.sparsekit.unique(KEYS)
    assert unique.tolist() == [5, -1, 7]
    launched = {name: counts.sum("unique", name) for name in counts.names("unique")}
    assert {name for name, count in launched.items() if count.kernels == 1} == {
        f"unique: {kernel}" for kernel in ("clear", "enter", "rank", "emit")
    }
    assert launched["read back"].waits == 1
    # The op calls torch to cut the result to its size.
    assert launched["aten::copy_"].torch == 2
    total = counts.sum()
    assert (total.calls, total.kernels, total.library, total.waits) == (1, 4, 0, 1)
    assert total.launches == total.operations == 4 + 2


def test_operations_of_cub():
    with counted() as counts:
        torch.ops.sparsekit.bucketize(KEYS, 3)
    scan = counts.sum("bucketize", "scan")
    assert (scan.library, scan.launches, scan.operations) == (1, 1, 2)


def test_memsets():
    table = sparsekit.HashTable(8)
    with counted() as counts:
        table.find_or_insert(KEYS[:4])
    assert counts.sum("hash_table_find_or_insert_").memsets == 1
    assert counts.sum("hash_table_find_or_insert_", "memset").written == 8


@pytest.mark.parametrize(("repeats", "distinct"), [(1, 40), (20, 40), (1000, 1)])
def test_atomics(repeats, distinct):
    keys = torch.arange(distinct).repeat(repeats)
    with counted() as counts:
        torch.ops.sparsekit.unique(keys)
    assert counts.sum("unique", "unique: clear").atomics == 0
    # Keys that are equal claim a place and add their position and number as one. A lost claim is
    # repeated. First positions are marked, 32 at a time.
    words = -(-distinct // 32)
    assert 0 <= counts.sum("unique", "unique: enter").atomics - 3 * distinct - words < distinct


@needs_bytes
@pytest.mark.parametrize(("rows", "distinct"), [(torch.arange(0, 64, 2), 32), (torch.zeros(32), 1)])
def test_bytes(rows, distinct):
    weight = torch.arange(64 * 8, dtype=torch.float32).view(64, 8)
    rows = rows.long()
    with counted() as counts:
        out = ops.gather_rows(weight, rows)
    assert torch.equal(out, weight[rows])
    count = counts.sum("gather_rows", "gather_rows")
    numbers, row = 32 * 8, 8 * 4  # bytes; a row's two lanes both read its number
    assert count.read == numbers + distinct * row
    assert count.written == 32 * row
    assert count.accessed == 2 * numbers + 2 * 32 * row
    assert count.moved == count.read + count.written


def test_counts_begin_at_nothing():
    def once():
        with counted() as counts:
            torch.ops.sparsekit.unique(KEYS)
        return {key: count.launches for key, count in counts.items()}

    first = once()
    with simt.SimtMode():
        torch.ops.sparsekit.unique(KEYS)
    assert once() == first
    assert Runner().take() == []
    Runner().count(False)


def test_nothing_is_counted_outside():
    with counted() as counts:
        pass
    with simt.SimtMode():
        torch.ops.sparsekit.unique(KEYS)
    assert counts == {}


def test_an_error_ends_the_counting():
    with pytest.raises(ValueError, match="gather_rows"), counted() as counts:
        torch.ops.sparsekit.gather_rows(torch.zeros(2, 2, 2), KEYS)
    assert counts.sum().kernels == 0
    with counted() as counts:
        torch.ops.sparsekit.unique(KEYS)
    assert counts.sum().kernels == 4


def test_no_two_at_a_time_in_a_thread():
    with counted(), pytest.raises(RuntimeError, match="counting already"), counted():
        pass


def test_threads_count_for_themselves():
    weight, rows, rounds = torch.zeros(64, 8), torch.arange(32), 20
    found, together = {}, threading.Barrier(2)

    def count(name, call):
        together.wait()
        with counted() as counts:
            for _ in range(rounds):
                call()
        found[name] = counts

    threads = [
        threading.Thread(target=count, args=("unique", lambda: torch.ops.sparsekit.unique(KEYS))),
        threading.Thread(target=count, args=("gather_rows", lambda: ops.gather_rows(weight, rows))),
    ]
    before = Runner().set_checked(True)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Checks are off while any thread counts, and on again afterwards.
        assert Runner().set_checked(True)
    finally:
        Runner().set_checked(before)
    assert found["unique"].ops() == ["unique"]
    assert found["unique"].sum().kernels == 4 * rounds
    assert found["gather_rows"].ops() == ["gather_rows"]
    assert found["gather_rows"].sum().kernels == rounds
    if Runner().sees_bytes():
        assert found["gather_rows"].sum().written == rounds * 32 * 32


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda x: x + x, Count(calls=1, torch=1, read=80, written=40)),
        (lambda x: x.clone().zero_(), Count(calls=2, torch=2, read=40, written=80)),
        (lambda x: x.view(2, 5)[1].detach(), Count()),
        (lambda x: torch.empty_like(x), Count()),
        (lambda x: x[:0] + 1, Count()),
        (lambda x: x[x.new_tensor([1, 1]).long()], None),
        (lambda x: int(x[0]), Count(calls=1, waits=1)),
        (lambda x: x.tolist(), Count(calls=1, waits=1)),
        (lambda x: x.nonzero(), Count(calls=1, torch=1, waits=1, read=40, written=80)),
        (lambda x: x[x > 0], None),
        (lambda _: torch.tensor([1.0]), Count(calls=1, copies_in=1)),
    ],
)
def test_ops_of_torch(call, expected):
    x = torch.ones(10)
    with counted() as counts:
        call(x)
    total = counts.sum()
    if expected is None:  # decomposes into several ops
        assert total.torch >= 2
        return
    accessed = expected.read + expected.written
    assert total == expected + Count(accessed=accessed)


@pytest.fixture(scope="module")
def tables():
    return cuda_counts.tables()


@pytest.mark.parametrize(("tables", "most"), [(1, 18), (26, 18), (500, 24)])
def test_a_step_of_layers_takes_few_launches(tables, most):
    """More tables only take longer descriptions and sort keys, and a fused step never waits."""
    step = cuda_counts.Step(tables, fused=True, batch=4, nnz=2, dim=8, keys=20)
    total = step.count().sum()
    assert total.operations <= most
    assert total.waits == 0


@pytest.mark.parametrize(("tables", "score"), [(1, "lru"), (26, "lfu"), (150, "lfu")])
def test_scores_and_eviction_take_two_launches_more(tables, score):
    """As long as no table is over its budget."""
    one = {"tables": tables, "fused": True, "batch": 4, "nnz": 2, "dim": 8, "keys": 20}
    plain = cuda_counts.Step(**one).count().sum()
    evicting = cuda_counts.Step(
        **one, rows=200, on_full="evict", score=score, ttl=100, max_rows=150
    )
    total = evicting.count().sum()
    assert plain.operations < total.operations <= plain.operations + 2
    assert total.waits == 0


@needs_bytes
def test_the_status_has_what_is_counted(tables):
    """docs/gpu-status.md has the current counts; `make cuda-counts` rewrites it after a change."""
    written = cuda_counts.in_status(cuda_counts.STATUS.read_text())
    assert cuda_counts.exact(written) == cuda_counts.exact(tables)
    for then, now in zip(totals(written), totals(tables), strict=True):
        for one, other in zip(then, now, strict=True):
            assert one == pytest.approx(other, rel=0.2)


def totals(text):
    """Return the atomics and bytes of each configuration in docs/gpu-status.md."""
    rows = [line for line in text.splitlines() if line.startswith("| **all**")]
    assert len(rows) == 4
    return [[float(cell) for cell in row.split("|")[-4:-1]] for row in rows]


def test_columns_of_chance_are_left_out(tables):
    left = cuda_counts.exact(tables)
    assert "waits" in left
    assert "KB moved" not in left
    row = r"^\| `group_find_or_insert_` \| 1 \| 7 \| 1 \|  \|  \|  \|  $"
    assert re.search(row, left, re.MULTILINE)
