"""What only a device has: streams, several devices, graphs; and reports of bad values.

At the end layers, optimizers and tables on a device, against the CPU. Those tests run on every
backend, so that each of their lines has run before it meets a GPU.
"""

import copy
import ctypes
import functools
import io

import pytest
import simt
import torch
from conftest import HAS_GPU, ROW_DTYPES, assert_close, generator, randn
from torch.utils._python_dispatch import _disable_current_modes

import sparsekit
from benchmarks import waits
from benchmarks.fused_step import FusedStep, captured
from sparsekit import ops
from sparsekit.datasets import Ratings
from sparsekit.models import RatingModel
from sparsekit.optim import (
    Adam,
    LazyAdam,
    RowWiseAdagrad,
    fuse_in_backward,
    split_embedding_variable_from_others,
)
from sparsekit.train import Trainer

gpu = pytest.mark.cuda


@pytest.fixture(autouse=True)
def needs_gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("cuda") and not HAS_GPU:
        pytest.skip("no GPU, or a build without CUDA")


@gpu
def test_ops_run_on_the_current_stream():
    new_keys = torch.arange(5000, device="cuda") * 7

    def inputs() -> tuple[sparsekit.HashTable, torch.Tensor]:
        table = sparsekit.HashTable(10_000, device="cuda")
        return table, torch.zeros(5000, dtype=torch.int64, device="cuda")

    def chain(table: sparsekit.HashTable, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keys.copy_(new_keys)  # an op on another stream would see zeros
        unique, inverse, _, count = torch.ops.sparsekit.unique_padded(keys)
        rows, _ = torch.ops.sparsekit.hash_table_find_or_insert_(
            table.buckets, table.size, keys, table.capacity
        )
        return unique, inverse, count, rows, ops.gather_rows(keys.double().unsqueeze(1), rows)

    stream = torch.cuda.Stream()
    throw_away, wanted = inputs(), inputs()
    torch.cuda.synchronize()
    # With checks on every op waits.
    with sparsekit.checked(False), torch.cuda.stream(stream):
        # The first call of a kernel loads it, and a first tensor takes memory from the device;
        # either may wait for all that runs there.
        torch.cuda._sleep(1)
        chain(*throw_away)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        unique, inverse, count, rows, vectors = chain(*wanted)
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
    torch.cuda.synchronize()  # the tensors were made on another stream
    # With checks on every op waits, which a capture does not allow.
    with sparsekit.checked(False):
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
@pytest.mark.parametrize("kind", [LazyAdam, Adam, RowWiseAdagrad])
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
        for _ in range(2):  # the first steps load kernels and make the state
            layer(keys).sum().backward()
            optimizer.step()
        loss = layer(keys).sum()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
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
                [0.1, 0, 1e-8],
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


@pytest.mark.parametrize("count", [-1, 0, 1, 5, 6, 9])
def test_an_update_takes_only_as_many_gradients(device, count):
    used = min(max(count, 0), 6)
    rows = torch.tensor([3, 0, 9, 4, 7, -1], device=device)  # the last is none, as padding is
    grad = randn(6, 5, seed=1).to(device)
    step = torch.ones((), dtype=torch.int64, device=device)

    def updated(kept: int, number: torch.Tensor | None) -> torch.Tensor:
        weight = randn(10, 5).to(device)
        torch.ops.sparsekit.update_rows_(
            weight, [], None, rows[:kept], grad[:kept], step, "sgd", [0.1, 0, 0, 0],
            num_grads=number,
        )  # fmt: skip
        return weight

    number = torch.tensor([count], device=device)
    if used == 6:
        with pytest.raises(IndexError, match=r"rows\[5\] is -1, but weight has 10 rows"):
            updated(6, number)
        return
    assert torch.equal(updated(6, number), updated(used, None))


def test_a_number_of_gradients_must_be_one_int64(device):
    weight, step = torch.zeros(3, 2, device=device), torch.ones((), dtype=torch.int64)
    for number, message in (
        (torch.tensor([1.0]), "num_grads must have dtype Long"),
        (torch.tensor([1, 2]), "num_grads must have one element, got 2"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.sparsekit.update_rows_(
                weight, [], None, None, weight, step.to(device), "sgd", [0.1, 0, 0, 0],
                num_grads=number.to(device),
            )  # fmt: skip


# Layers, optimizers and tables on a device


LAYERS = {
    **{
        combiner: functools.partial(
            sparsekit.DistributedEmbedding, combiner, 100, 16, slot_num=2, max_nnz=4
        )
        for combiner in ("sum", "mean", "sqrtn")
    },
    "dense": functools.partial(
        sparsekit.All2AllDenseEmbedding, 100, 16, slot_num=2, nnz_per_slot=4
    ),
}
PADDING = -1
each_layer = pytest.mark.parametrize("kind", LAYERS)


class Run:
    """A layer in training; every run of a kind and a dtype takes the same steps."""

    def __init__(self, kind, dtype, device):
        self.kind = kind
        self.layer = LAYERS[kind](
            dtype=dtype,
            device=device,
            name=kind,
            seed=5,
            padding_key=PADDING,
            embedding_initializer=sparsekit.nn.Uniform(-1.0, 1.0),
        )
        self.optimizer = LazyAdam(self.layer.parameters(), lr=0.01)

    def inputs(self, number):
        """Keys that repeat, new ones in every step, with padding; for bags, weights as well."""
        device = self.layer.weight.device
        ids = torch.randint(0, 20 + 10 * number, (6, 2, 4), generator=generator(number))
        keys = (ids * 0x1E3779B97F4A7C15).masked_fill(ids % 7 == 0, PADDING).to(device)
        if self.kind == "dense":
            return (keys,)
        weights = (randn(6, 2, 4, seed=number).abs() + 0.5).to(device)
        if number % 2 == 0:
            return keys, weights
        offsets = torch.arange(0, 49, 4, device=device)
        return (keys.flatten(), offsets), weights.flatten()

    def step(self, number):
        """Take one step with checks off, as users do; returns the output."""
        with sparsekit.checked(False):
            self.optimizer.zero_grad()
            out = self.layer(*self.inputs(number))
            out.backward(randn(*out.shape, dtype=out.dtype, seed=number).to(out.device))
            self.optimizer.step()
        return out.detach()

    def state(self):
        return self.layer.state_dict(), self.optimizer.state_dict()

    def load(self, state):
        self.layer.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

    def tensors(self):
        """The state by name."""
        return {**self.layer.state_dict(), **self.optimizer.state[self.layer.weight]}


def on_cpu(kind, dtype, steps):
    """The twin of a run: so many steps on the CPU engine, also under the host runner's mode."""
    with _disable_current_modes():
        twin = Run(kind, dtype, "cpu")
        return twin, [twin.step(number) for number in range(steps)]


def assert_same_state(run, twin, device):
    """Equality of keys, rows and counts, and of all else up to rounding."""
    assert run.layer.table.keys().tolist() == twin.layer.table.keys().tolist()
    theirs = twin.tensors()
    for name, tensor in run.tensors().items():
        assert tensor.device.type == device.type, name
        if tensor.is_floating_point():
            assert_close(tensor.cpu(), theirs[name])
        elif name != "table.buckets":  # which slot of a bucket a key takes is free
            assert torch.equal(tensor.cpu(), theirs[name]), name


@pytest.mark.parametrize("dtype", ROW_DTYPES)
@each_layer
def test_three_steps_of_a_layer_are_those_of_the_cpu(device, kind, dtype):
    run = Run(kind, dtype, device)
    twin, outputs = on_cpu(kind, dtype, 3)
    for number, expected in enumerate(outputs):
        assert_close(run.step(number).cpu(), expected)
    assert_same_state(run, twin, device)
    assert run.tensors()["step"] == 3
    # In evaluation, unseen keys among others.
    run.layer.eval()
    twin.layer.eval()
    size = len(twin.layer.table)
    with torch.no_grad():
        assert_close(run.layer(*run.inputs(7)).cpu(), twin.layer(*twin.inputs(7)))
    assert len(run.layer.table) == size


@each_layer
def test_a_layer_in_training_moves(device, kind):
    outputs = on_cpu(kind, torch.float32, 5)[1]
    run = Run(kind, torch.float32, "cpu")

    def check_step(number):
        assert_close(run.step(number).cpu(), outputs[number])
        twin, _ = on_cpu(kind, torch.float32, number + 1)
        assert_same_state(run, twin, run.layer.weight.device)

    check_step(0)
    weight = run.layer.weight
    run.layer.to(device)
    assert run.layer.weight is weight  # so the optimizer still has it
    run.optimizer.load_state_dict(run.optimizer.state_dict())  # moves the state after it
    assert_same_state(run, on_cpu(kind, torch.float32, 1)[0], device)
    check_step(1)
    original, run = run, copy.deepcopy(run)
    check_step(2)
    assert original.tensors()["step"] == 2
    # To the CPU and back.
    for where in ("cpu", device):
        state, run = run.state(), Run(kind, torch.float32, where)
        run.load(state)
        check_step(3 if where == "cpu" else 4)


@pytest.mark.parametrize("kind", [LazyAdam, torch.optim.SparseAdam])
def test_an_optimizer_goes_on_from_a_state_of_the_cpu(device, kind):
    def step(optimizer, weight, number):
        rows = torch.randperm(9, generator=generator(number))[None, :4]
        weight.grad = torch.sparse_coo_tensor(
            rows, randn(4, 3, seed=number), (9, 3), check_invariants=False
        ).to(weight.device)
        optimizer.step()

    saved = torch.nn.Parameter(randn(9, 3))
    optimizer = kind([saved], lr=0.1)
    step(optimizer, saved, 1)
    weight = torch.nn.Parameter(saved.detach().to(device, copy=True))
    resumed = LazyAdam([weight])
    # A copy, since torch lets two optimizers of one device share what one has loaded.
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (2, 3):
        step(optimizer, saved, number)
        step(resumed, weight, number)
    assert_close(weight.detach().cpu(), saved.detach())
    state = resumed.state[weight]
    assert {value.device for value in state.values()} == {weight.device}
    assert state["step"] == 3


def test_a_table_moves(device):
    keys = torch.randperm(300, generator=generator(0)) * 0x1E3779B97F4A7C15
    there, then, never = keys[:100], keys[100:200], keys[200:]
    table = sparsekit.HashTable(250)
    table.find_or_insert(there)
    assert table.to(device) is table
    assert table.buckets.device.type == table.size.device.type == device.type
    assert table.find(keys.to(device)).tolist() == [*range(100), *[-1] * 200]
    assert table.find_or_insert(then.to(device)).tolist() == list(range(100, 200))
    twin = copy.deepcopy(table)
    table.to("cpu")
    for one, on in ((table, "cpu"), (twin, device)):
        assert one.keys().tolist() == keys[:200].tolist()
        assert one.find(keys.to(on)).tolist() == [*range(200), *[-1] * 100]
        with pytest.raises(sparsekit.TableFullError):
            one.find_or_insert(never.to(on))
    loaded = sparsekit.HashTable(250, device=device)
    loaded.load_state_dict(table.state_dict())
    assert loaded.find(keys.to(device)).tolist() == [*range(200), *[-1] * 100]


def test_the_model_of_ratings_trains_on_a_device(device):
    users, items = (torch.randint(0, 9, (60,), generator=generator(n)) for n in range(2))
    values, times = randn(60).sigmoid() * 5, torch.arange(60, dtype=torch.float64)
    data = Ratings(users, items, values, times)

    def train(where):
        # Under a default device too, which must not reach what has generators of the CPU.
        with torch.device(where):
            model = RatingModel(data, dim=4, capacity=50, history_size=5).to(where)
            sparse, dense = split_embedding_variable_from_others(model)
            optimizers = [LazyAdam(sparse, lr=0.01), torch.optim.Adam(dense, lr=0.01)]
            trainer = Trainer(
                model, lambda model, batch: model.losses(*batch), optimizers, stream=io.StringIO()
            )
            batch = tuple(tensor.to(where) for tensor in (users, items, values))
            losses = [epoch.loss for epoch in trainer.fit(batch, epochs=2, batch_size=16)]
            return losses, model.eval()(*batch[:2]).detach().cpu()

    with _disable_current_modes():
        expected, predicted = train("cpu")
    losses, predictions = train(device)
    assert losses == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(predictions, predicted, rtol=1e-3, atol=1e-3)


def ratings(number):
    """Made up, with something to learn: each user likes items near its own number."""
    users, items = (torch.randint(0, 50, (number,), generator=generator(n)) for n in range(2))
    values = 5 - ((users - items).abs() % 50) / 12 + randn(number, seed=2) / 4
    return Ratings(users, items, values.clamp(1, 5), torch.arange(number, dtype=torch.float64))


def test_200_steps_of_the_demo_give_the_losses_of_the_cpu(device):
    """The model, optimizers and learning rates of `sparsekit train`."""
    data = ratings(800)

    def train(where):
        model = RatingModel(data, dim=8, capacity=100, history_size=8).to(where)
        sparse, dense = split_embedding_variable_from_others(model)
        optimizers = [LazyAdam(sparse, lr=0.02), torch.optim.Adam(dense, lr=1e-3)]
        losses = []

        def loss_fn(_, batch):
            squares, penalty = model.losses(*batch)
            losses.append(squares.detach().mean().cpu())
            return squares, penalty

        trainer = Trainer(model, loss_fn, optimizers, stream=io.StringIO())
        columns = [column.to(where) for column in (data.users, data.items, data.ratings)]
        trainer.fit(tuple(columns), epochs=8, batch_size=32)
        return torch.stack(losses)

    with _disable_current_modes():
        expected = train("cpu")
    losses = train(device)
    assert len(losses) == 200
    assert losses[-25:].mean() < losses[:25].mean() / 2  # it has learned something
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["grad", "in backward"])
def test_how_often_a_step_waits(backend, device, mode):
    """A step of a layer waits for the device a few times, which is still to become none."""
    if backend == "cpu":
        pytest.skip("there is nothing to wait for")
    layer = sparsekit.DistributedEmbedding("sum", 1000, 8, 2, 3, device=device, name="waits")
    optimizer = LazyAdam(layer.parameters(), lr=0.01)
    if mode == "in backward":
        fuse_in_backward(optimizer, layer)
    keys = torch.randint(0, 500, (16, 2, 3), generator=generator(0)).to(device)

    def step():
        layer(keys).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    set_checked = ctypes.CDLL(
        str(simt.LIBRARY if backend == "simt" else waits.LIBRARY)
    ).sparsekit_set_checked
    before = set_checked(0)
    try:
        for _ in range(2):
            step()
        counted = waits.count(step, simt.LIBRARY if backend == "simt" else waits.LIBRARY)
    finally:
        set_checked(before)
    # The number of distinct keys, and whether they have found room.
    assert counted.sparsekit == 1
    assert counted.torch <= 12
    print(f"{mode}: {counted}")


def fused_and_layer(device, steps):
    """A step by ops, its inputs, and what a layer on the CPU makes of them, vectors and weight."""
    offsets = torch.tensor([0, 3, 3, 7, 12])
    batches = [torch.randint(0, 9 + 4 * n, (12,), generator=generator(n)) for n in range(steps)]
    grads = [randn(4, 8, seed=n) for n in range(steps)]
    with _disable_current_modes():
        layer = sparsekit.DistributedEmbedding("sum", 40, 8, 1, 5, seed=3)
        optimizer = LazyAdam(layer.parameters(), lr=0.01)
        outputs = []
        for keys, grad in zip(batches, grads, strict=True):
            outputs.append(layer((keys, offsets)).squeeze(1))
            outputs[-1].backward(grad)
            optimizer.step()
            optimizer.zero_grad()
    fused = FusedStep(40, 8, offsets.to(device), seed=3, lr=0.01)
    inputs = [(k.to(device), g.to(device)) for k, g in zip(batches, grads, strict=True)]
    return fused, inputs, outputs, layer


def test_a_step_by_ops_is_that_of_a_layer(device):
    fused, inputs, outputs, layer = fused_and_layer(device, 5)
    for (keys, grad), expected in zip(inputs, outputs, strict=True):
        assert_close(fused(keys, grad).cpu(), expected.detach())
    assert fused.table.keys().tolist() == layer.table.keys().tolist()
    assert_close(fused.weight.cpu(), layer.weight.detach())


@gpu
def test_a_step_by_ops_waits_for_nothing_and_is_captured_in_a_graph():
    fused, inputs, outputs, layer = fused_and_layer("cuda", 6)
    keys, grad = (torch.empty_like(x) for x in inputs[0])
    keys.copy_(inputs[0][0])
    grad.copy_(inputs[0][1])
    with sparsekit.checked(False):
        graph, pooled = captured(fused, keys, grad)  # has taken the first step
        for i in range(1, 6):
            keys.copy_(inputs[i][0])
            grad.copy_(inputs[i][1])
            assert waits.count(graph.replay).all == 0
            assert_close(pooled.cpu(), outputs[i].detach())
        assert waits.count(functools.partial(fused, keys, grad)).all == 0
    assert fused.table.keys().tolist() == layer.table.keys().tolist()
