"""Layers, optimizers, tables and models give the same results on a device as on the CPU.

Most tests run on every backend, so that their code has run before it is used on a GPU.
"""

import copy
import functools
import io

import pytest
import simt
import torch
from conftest import ROW_DTYPES, assert_close, generator, randn
from deferred_errors import deferred_errors
from torch.utils._python_dispatch import _disable_current_modes

import sparsekit
from benchmarks import waits
from benchmarks.fused_step import FusedStep, captured
from sparsekit import device_rooms, memory
from sparsekit.datasets import Ratings
from sparsekit.models import RatingModel
from sparsekit.optim import (
    LazyAdam,
    fuse_in_backward,
    split_embedding_variable_from_others,
)
from sparsekit.train import Trainer

gpu = pytest.mark.cuda

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
    """Layer in training; all runs of the same kind and dtype take the same steps."""

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
        """Return keys with repeats, padding and new keys; for a layer of bags, also weights."""
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
        """Take one step with checks off, as users do; return the output."""
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
        """Return the tensors of the layer and the optimizer by name."""
        return {**self.layer.state_dict(), **self.optimizer.state[self.layer.weight]}


def on_cpu(kind, dtype, steps):
    """Take `steps` steps on the CPU engine, even in SimtMode; return the run and its outputs."""
    with _disable_current_modes():
        twin = Run(kind, dtype, "cpu")
        return twin, [twin.step(number) for number in range(steps)]


def assert_same_state(run, twin, device):
    """Check that keys, rows and counts are equal, and the other tensors up to rounding."""
    assert run.layer.table.keys().tolist() == twin.layer.table.keys().tolist()
    theirs = twin.tensors()
    for name, tensor in run.tensors().items():
        assert tensor.device.type == device.type, name
        if tensor.is_floating_point():
            assert_close(tensor.cpu(), theirs[name])
        elif name not in ("table.buckets", "table.hash_seed"):  # key positions may differ
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
    # Evaluation also looks up unseen keys.
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
    assert run.layer.weight is weight  # so the optimizer still owns it
    # Loading moves the state to the weight's device.
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert_same_state(run, on_cpu(kind, torch.float32, 1)[0], device)
    check_step(1)
    original, run = run, copy.deepcopy(run)
    check_step(2)
    assert original.tensors()["step"] == 2
    # Move to the CPU and back.
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
    # Load a copy: otherwise both optimizers, on one device, would share the state.
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
    assert {buffer.device.type for buffer in table.buffers()} == {device.type}
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
        # A default device must not reach code that uses generators on the CPU.
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
    """Generate ratings that can be learned: users like items with numbers near their own."""
    users, items = (torch.randint(0, 50, (number,), generator=generator(n)) for n in range(2))
    values = 5 - ((users - items).abs() % 50) / 12 + randn(number, seed=2) / 4
    return Ratings(users, items, values.clamp(1, 5), torch.arange(number, dtype=torch.float64))


def test_200_steps_of_the_demo_give_the_losses_of_the_cpu(device):
    """Losses agree for the model, optimizers and learning rates of `sparsekit train`."""
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
    assert losses[-25:].mean() < losses[:25].mean() / 2  # the model has learned something
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["grad", "in backward"])
def test_how_often_a_step_waits(backend, device, mode):
    """Limit how often a layer's step waits for the device; the goal is no wait."""
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

    with deferred_errors() if backend == "simt" else sparsekit.checked(False):
        for _ in range(2):
            step()
        counted = waits.count(step, simt.LIBRARY if backend == "simt" else waits.LIBRARY)
    # A step waits to learn how long the gradient is.
    assert counted.sparsekit == (1 if mode == "grad" else 0)
    assert counted.torch <= 12
    print(f"{mode}: {counted}")


def fused_and_layer(device, steps):
    """Return a step that calls ops, its inputs, the outputs of a CPU layer, and that layer."""
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
        graph, pooled = captured(fused, keys, grad)  # the capture takes the first step
        for i in range(1, 6):
            keys.copy_(inputs[i][0])
            grad.copy_(inputs[i][1])
            assert waits.count(graph.replay).all == 0
            assert_close(pooled.cpu(), outputs[i].detach())
        assert waits.count(functools.partial(fused, keys, grad)).all == 0
    assert fused.table.keys().tolist() == layer.table.keys().tolist()


def grown(device, steps, **options):
    """Take steps with new keys; return what training changes, of the rows in use."""
    layer = sparsekit.Embedding(embedding_dim=16, name="grows", seed=1, device=device, **options)
    optimizer = LazyAdam(layer.parameters(), lr=0.1)
    weight, address = layer.weight, layer.weight.data_ptr()
    for i in range(steps):
        keys = torch.arange(200 * i, 200 * i + 300, device=device).repeat(2)
        layer(keys).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if i == steps // 2:
            copied = copy.deepcopy((layer, optimizer))
            assert torch.equal(copied[0].weight[:300].cpu(), layer.weight[:300].cpu())
    sparsekit.raise_errors()
    assert (layer.weight, layer.weight.data_ptr()) == (weight, address)
    state = optimizer.state[layer.weight]
    rows = len(layer.table)
    named = {"weight": layer.weight.detach(), "exp_avg": state["exp_avg"]}
    return {"keys": layer.table.keys()} | {name: x[:rows].cpu() for name, x in named.items()}


@pytest.mark.parametrize("checked", [False, True])
def test_a_layer_that_grows(device, checked):
    with sparsekit.checked(checked):
        found = grown(device, 12, num_embeddings=100, on_full="grow", max_capacity=1 << 20)
        expected = grown(device, 12, num_embeddings=5000)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@gpu
def test_a_layer_that_grows_without_a_number_of_rows():
    with sparsekit.checked(False):
        found = grown("cuda", 12, num_embeddings=None)
    assert len(found["keys"]) == 2500


@gpu
def test_only_steps_that_grow_wait():
    layer = sparsekit.Embedding(1000, 16, on_full="grow", device="cuda")
    optimizer = LazyAdam(layer.parameters())
    fuse_in_backward(optimizer, layer)
    keys = torch.arange(900, device="cuda")

    def step():
        layer(keys).sum().backward()
        optimizer.step()

    with sparsekit.checked(False):
        for _ in range(20):
            step()
        assert waits.count(step).all == 0


@gpu
def test_rooms_give_their_memory_back():
    """They take more, one after the other, than any device has."""
    for _ in range(400):
        room = memory.untouched_zeros((1 << 30, 1), torch.float32, "cuda", 1 << 28)
        assert device_rooms.is_in_room(room)
        assert not room[-1 + (1 << 28)].any()
        del room
