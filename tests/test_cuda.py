"""Tests of streams, devices and graphs on a GPU, and of reports of bad values on all backends."""

import ctypes

import pytest
import simt
import torch
from conftest import generator, randn, same_bits

import sparsekit
from sparsekit import ops
from sparsekit.optim import SGD, LazyAdam, RowWiseAdagrad, fuse_in_backward
from sparsekit.train import CapturedStep

gpu = pytest.mark.cuda


@gpu
def test_ops_run_on_the_current_stream():
    new_keys = torch.arange(5000, device="cuda") * 7

    def inputs() -> tuple[sparsekit.HashTable, torch.Tensor]:
        table = sparsekit.HashTable(10_000, device="cuda")
        return table, torch.zeros(5000, dtype=torch.int64, device="cuda")

    def chain(table: sparsekit.HashTable, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys.copy_(new_keys)  # an op on another stream would still see zeros
        unique, inverse, _, count = torch.ops.sparsekit.unique_padded(keys)
        rows, _ = torch.ops.sparsekit.hash_table_find_or_insert_(
            table.buckets, table.hash_seed, table.size, keys, table.capacity
        )
        return unique, inverse, count, rows, ops.gather_rows(keys.double().unsqueeze(1), rows)

    stream = torch.cuda.Stream()
    throw_away, wanted = inputs(), inputs()
    torch.cuda.synchronize()
    # Turn checks off: with checks, every op waits.
    with sparsekit.checked(False), torch.cuda.stream(stream):
        # Warm up: a first call loads its kernel, and a first tensor allocates device memory;
        # either step may wait for all of the device's work.
        torch.cuda._sleep(1)
        chain(*throw_away)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        unique, inverse, count, rows, vectors = chain(*wanted)
        assert not stream.query()  # no op has waited
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
            table.buckets, table.hash_seed, table.size, keys, table.capacity
        )
        ops.init_rows_(weight, keys, rows, status, distribution="constant", a=2.0)
        return ops.gather_rows(weight, rows)

    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the tensors were made on another stream
    # Turn checks off: with checks, every op waits, which a capture does not allow.
    with sparsekit.checked(False):
        with torch.cuda.stream(stream):
            lookup()  # torch requires a warm-up before a capture
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
@pytest.mark.parametrize("kind", [LazyAdam, RowWiseAdagrad, SGD])
def test_a_captured_step_follows_a_schedule_and_inserts_keys(kind):
    """Ten steps, of which three warm up and seven are replays, give the bits of the step itself."""

    def trained(captures: bool) -> list[torch.Tensor]:
        layers = {
            f"t{i}": sparsekit.DistributedEmbedding(
                combiner, 1000, 8, 2, 3, seed=i, device="cuda", name=f"captured {i}"
            )
            for i, combiner in enumerate(("sum", "mean", "sqrtn"))
        }
        group = sparsekit.EmbeddingGroup(layers)
        optimizer = kind(group.parameters(), lr=torch.tensor(0.5, device="cuda"))
        fuse_in_backward(optimizer, group)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

        def step(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(out.square().mean() for out in group(inputs).values())
            loss.backward()
            optimizer.step()
            return loss

        call = CapturedStep(step, group, optimizer) if captures else step
        losses = []
        for i in range(10):
            keys = torch.randint(0, 10 + 5 * i, (3, 6, 2, 3), generator=generator(i)).cuda()
            losses.append(call({f"t{t}": own for t, own in enumerate(keys)}).detach().clone())
            scheduler.step()
        states = [value for state in optimizer.state.values() for value in state.values()]
        keys = [layer.table.keys() for layer in layers.values()]
        return [*losses, *keys, *group.parameters(), *states]

    with sparsekit.checked(False):
        found, expected = trained(True), trained(False)
        sparsekit.raise_errors("cuda")
    assert all(map(same_bits, found, expected))


def captured_bags(device, rows, **options):
    """Take captured steps with new keys; return the losses and the keys."""
    layer = sparsekit.DistributedEmbedding(
        "sum", rows, 8, 1, 1, seed=1, device=device, name="captured", **options
    )
    optimizer = LazyAdam(layer.parameters(), lr=0.1)
    fuse_in_backward(optimizer, layer)

    def step(keys: torch.Tensor) -> torch.Tensor:
        loss = layer(keys).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    captured = CapturedStep(step, layer, optimizer)
    batches = [torch.arange(20 * i, 20 * i + 30).view(30, 1, 1) for i in range(30)]
    losses = [captured(keys.to(device)).item() for keys in batches]
    return losses, layer.table.keys().tolist()


@gpu
def test_a_captured_step_grows():
    with sparsekit.checked(False):
        found = captured_bags("cuda", 10, on_full="grow", max_capacity=1 << 20)
        assert found == captured_bags("cuda", 2000)


@gpu
def test_a_captured_step_raises_for_a_full_table_and_a_wait():
    layer = sparsekit.DistributedEmbedding("sum", 60, 8, 1, 1, device="cuda", name="captured")
    optimizer = LazyAdam(layer.parameters(), lr=0.1)
    fuse_in_backward(optimizer, layer)

    def step(keys: torch.Tensor, waits: bool) -> torch.Tensor:
        loss = layer(keys).sum()
        loss.backward()
        optimizer.step()
        return loss.cpu() if waits else loss

    with sparsekit.checked(False):
        waiting = CapturedStep(step, layer, optimizer, warm_ups=1)
        waiting(torch.arange(5).view(5, 1, 1), True)
        with pytest.raises(RuntimeError, match=r"^CapturedStep: the step cannot be captured"):
            waiting(torch.arange(5).view(5, 1, 1), True)
        captured = CapturedStep(step, layer, optimizer, warm_ups=1)
        for i in range(6):
            captured(torch.arange(10 * i, 10 * i + 10).view(10, 1, 1), False)
        with pytest.raises(sparsekit.TableFullError):
            captured(torch.arange(60, 70).view(10, 1, 1), False)
    assert len(layer.table) == 60


@gpu
@pytest.mark.parametrize("kind", [LazyAdam, SGD, RowWiseAdagrad])
def test_updates_in_backward_do_not_wait(kind):
    layer = sparsekit.All2AllDenseEmbedding(
        1000, 8, 1, 1, dynamic_input=True, device="cuda", name="does not wait"
    )
    optimizer = kind(layer.parameters(), lr=0.1)
    fuse_in_backward(optimizer, layer)
    keys = torch.arange(64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with sparsekit.checked(False), torch.cuda.stream(stream):
        torch.cuda._sleep(1)
        for _ in range(2):  # the first steps load kernels and create the optimizer's state
            layer(keys).sum().backward()
            optimizer.step()
        loss = layer(keys).sum()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second, since the host may be busy
        loss.backward()
        optimizer.step()
        assert not stream.query()
    torch.cuda.synchronize()
    assert optimizer.state[layer.weight]["step"] == 3


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
            lambda: ops.update_rows_(
                weight, [moments], None, None, weight.clone(), torch.tensor([1]), "adagrad",
                [0.1, 0, 1e-8, 0, 0],
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
        table.buckets, table.hash_seed, table.size, keys, 200, number
    )
    assert torch.equal(rows[:used], twin.find_or_insert(keys[:used]))
    assert (rows[used:] == -1).all()
    assert status.tolist() == [0, 0]
    assert len(table) == len(twin)
    found = torch.ops.sparsekit.hash_table_find(table.buckets, table.hash_seed, keys, number)
    assert torch.equal(found, rows)
    by_owner, counts, permutation = torch.ops.sparsekit.bucketize(keys, 3, num_keys=number)
    for result, whole in zip(
        (by_owner[:used], counts, permutation[:used]), ops.bucketize(keys[:used], 3), strict=True
    ):
        assert torch.equal(result, whole)


@pytest.mark.parametrize("count", [-1, 0, 1, 5, 6, 9])
def test_an_update_takes_only_as_many_gradients(device, count):
    used = min(max(count, 0), 6)
    # The row of -1 gets no gradient: it is padding.
    rows = torch.tensor([3, 0, 9, 4, 7, -1], device=device)
    grad = randn(6, 5, seed=1).to(device)
    step = torch.ones((), dtype=torch.int64, device=device)
    last = torch.tensor([2], device=device)

    def updated(kept: int, number: torch.Tensor | None) -> torch.Tensor:
        weights = [randn(10, 5).to(device) for _ in range(2)]
        torch.ops.sparsekit.update_rows_(
            weights, [], [], [rows[:kept], last], [grad[:kept], grad[:1]], [step, step], "sgd",
            [0.1, 0, 0, 0], num_grads=number,
        )  # fmt: skip
        return torch.cat(weights)

    number = torch.tensor([count, 1], device=device)
    if used == 6:
        with pytest.raises(IndexError, match=r"table 0: rows\[5\] is -1, but weight has 10 rows"):
            updated(6, number)
        return
    assert torch.equal(updated(6, number), updated(used, None))


@pytest.mark.parametrize(
    "op", ["hash_table_find", "hash_table_find_or_insert_", "bucketize", "unique_padded"]
)
def test_a_number_of_keys_must_be_one_int64(device, op):
    table, keys = sparsekit.HashTable(5, device=device), torch.tensor([1, 2], device=device)
    arguments = {
        "hash_table_find": (table.buckets, table.hash_seed, keys),
        "hash_table_find_or_insert_": (table.buckets, table.hash_seed, table.size, keys, 5),
        "bucketize": (keys, 3),
        "unique_padded": (keys,),
    }[op]
    for number, message in (
        (torch.tensor([1], dtype=torch.int32), "num_keys must have dtype Long, got Int"),
        (torch.tensor([1, 2]), "num_keys must have one element, got 2"),
        (torch.tensor([], dtype=torch.int64), "num_keys must have one element, got 0"),
    ):
        with pytest.raises(ValueError, match=f"^{op}: {message}"):
            getattr(torch.ops.sparsekit, op)(*arguments, num_keys=number.to(device))
    assert len(table) == 0


def test_numbers_of_gradients_must_be_one_int64_for_a_table(device):
    weight, step = torch.zeros(3, 2, device=device), torch.ones((), dtype=torch.int64)
    for number, message in (
        (torch.tensor([1.0]), "num_grads must have dtype Long"),
        (torch.tensor([1, 2]), "num_grads must have one element for each of 1 tables, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.sparsekit.update_rows_(
                [weight], [], [], [], [weight.clone()], [step.to(device)], "sgd", [0.1, 0, 0, 0],
                num_grads=number.to(device),
            )  # fmt: skip
