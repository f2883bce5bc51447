"""What only a device has: streams, several devices, graphs; and reports of bad values."""

import ctypes

import pytest
import simt
import torch
from conftest import HAS_GPU

import sparsekit
from sparsekit import ops

gpu = pytest.mark.cuda


@pytest.fixture(autouse=True)
def needs_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") and not HAS_GPU:
        pytest.skip("no GPU, or a build without CUDA")


@gpu
def test_ops_run_on_the_current_stream():
    stream = torch.cuda.Stream()
    table = sparsekit.HashTable(10_000, device="cuda")
    keys = torch.zeros(5000, dtype=torch.int64, device="cuda")
    new_keys = torch.arange(5000, device="cuda") * 7
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        keys.copy_(new_keys)  # an op on another stream would see zeros
        unique, inverse, _, count = torch.ops.sparsekit.unique_padded(keys)
        rows, _ = torch.ops.sparsekit.hash_table_find_or_insert_(
            table.buckets, table.size, keys, table.capacity
        )
        vectors = ops.gather_rows(keys.double().unsqueeze(1), rows)
        assert not stream.query()  # none of them has waited
    torch.cuda.synchronize()
    assert int(count) == 5000
    assert torch.equal(unique, new_keys)
    assert torch.equal(inverse, torch.arange(5000, device="cuda"))
    assert torch.equal(rows, inverse)
    assert torch.equal(vectors.squeeze(1), new_keys.double())


@gpu
def test_ops_run_on_the_device_of_their_tensors():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    with torch.cuda.device(0):
        keys = torch.arange(1000, device="cuda:1") // 2
        unique, inverse, counts = ops.unique(keys)
        assert unique.device == inverse.device == counts.device == keys.device
        assert torch.equal(unique, torch.arange(500, device="cuda:1"))
        assert torch.cuda.current_device() == 0


@gpu
def test_a_chain_of_ops_is_captured_in_a_graph():
    table = sparsekit.HashTable(1000, device="cuda")
    weight = torch.zeros(1000, 8, device="cuda")
    keys = torch.zeros(64, dtype=torch.int64, device="cuda")

    def lookup() -> torch.Tensor:
        rows, status = torch.ops.sparsekit.hash_table_find_or_insert_(
            table.buckets, table.size, keys, table.capacity
        )
        ops.init_rows_(weight, keys, rows, status, distribution="constant", a=2.0)
        return ops.gather_rows(weight, rows)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        lookup()  # warm-up, as torch asks for before a capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        vectors = lookup()
    for start in (100, 200):
        keys.copy_(torch.arange(start, start + 64))
        graph.replay()
        assert (vectors == 2).all()
    assert len(table) == 1 + 128


@gpu
def test_bad_rows_are_reported_by_the_next_op_that_waits():
    table = torch.ones(4, 2, device="cuda")
    rows = torch.tensor([0, 9, 3], device="cuda")
    with sparsekit.checked(False):
        assert ops.gather_rows(table, rows).tolist() == [[1, 1], [0, 0], [1, 1]]
        with pytest.raises(IndexError, match=r"gather_rows: rows\[1\] .* in an earlier call"):
            ops.unique(rows)
        assert ops.unique(rows)[0].tolist() == [0, 9, 3]
    with sparsekit.checked(), pytest.raises(IndexError, match=r"rows\[1\] is 9, but table has 4"):
        ops.gather_rows(table, rows)


def test_the_same_on_the_host_runner():
    set_checked = ctypes.CDLL(str(simt.LIBRARY)).sparsekit_set_checked
    table, rows = torch.ones(4, 2), torch.tensor([0, 9, 3])
    with simt.SimtMode():
        with pytest.raises(IndexError, match=r"rows\[1\] is 9, but table has 4"):
            ops.gather_rows(table, rows)
        assert set_checked(0) == 1
        try:
            assert ops.gather_rows(table, rows).tolist() == [[1, 1], [0, 0], [1, 1]]
            with pytest.raises(IndexError, match=r"gather_rows: rows\[1\] .* in an earlier call"):
                ops.unique(rows)
            assert ops.unique(rows)[0].tolist() == [0, 9, 3]
        finally:
            assert set_checked(1) == 0


def test_with_checks_on_a_call_answers_for_itself_only():
    set_checked = ctypes.CDLL(str(simt.LIBRARY)).sparsekit_set_checked
    weight, moments = torch.ones(4, 2), torch.zeros(4, 2)
    with simt.SimtMode():
        for innocent in (
            lambda: ops.gather_rows(weight, torch.tensor([0, 1])),
            lambda: ops.lazy_adam_step_(
                weight, moments, moments.clone(), None, weight.clone(), torch.tensor([1]),
                lr=0.1, betas=(0.9, 0.99), eps=1e-8,
            ),
        ):  # fmt: skip
            set_checked(0)
            ops.gather_rows(weight, torch.tensor([0] * 4999 + [9]))
            set_checked(1)
            with pytest.raises(IndexError, match=r"gather_rows: rows\[4999\] .* an earlier call"):
                innocent()
            innocent()


def test_checked_gives_back_what_was():
    with sparsekit.checked(True):
        with sparsekit.checked(False):
            pass
        assert sparsekit.checked(True)._before
    sparsekit.checked(False)


def test_the_device_functions_read_counts_on_the_device(device):
    keys = torch.tensor([5, 5, 7, 9, 5, 11], device=device)
    for count, distinct in ((0, 0), (1, 1), (2, 1), (3, 2), (6, 4), (9, 4), (-3, 0)):
        unique, inverse, counts, num_unique = torch.ops.sparsekit.unique_padded(
            keys, torch.tensor([count], device=device)
        )
        used = min(max(count, 0), 6)
        assert num_unique.tolist() == [distinct]
        assert unique[:distinct].tolist() == [5, 7, 9, 11][:distinct]
        assert inverse[:used].tolist() == [0, 0, 1, 2, 0, 3][:used]
        assert counts[:distinct].sum() == used


@pytest.mark.parametrize("count", [-1, 0, 1, 63, 64, 200, 300])
def test_ops_take_only_as_many_keys_as_a_number_on_the_device_says(device, count):
    keys = (torch.arange(300) * 37 % 101).to(device)
    used = min(max(count, 0), 300)
    number = torch.tensor([count], device=device)
    table, twin = (sparsekit.HashTable(200, device=device) for _ in range(2))
    rows, status = torch.ops.sparsekit.hash_table_find_or_insert_(
        table.buckets, table.size, keys, 200, number
    )
    assert torch.equal(rows[:used], twin.find_or_insert(keys[:used]))
    assert (rows[used:] == -1).all()
    assert status.tolist() == [0, 0]
    assert len(table) == len(twin)
    found = torch.ops.sparsekit.hash_table_find(table.buckets, keys, number)
    assert torch.equal(found, rows)
    by_owner, counts, permutation = torch.ops.sparsekit.bucketize(keys, 3, number)
    for result, whole in zip(
        (by_owner[:used], counts, permutation[:used]), ops.bucketize(keys[:used], 3), strict=True
    ):
        assert torch.equal(result, whole)
