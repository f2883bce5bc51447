"""Late rows catch up even if only the layer, or only the optimizer, is copied or saved."""

import copy
import io
import pickle

import pytest
import torch
from conftest import same_bits
from torch.utils._python_dispatch import TorchDispatchMode

import sparsekit
from sparsekit import optim

from .cases import ALL_ROWS, make
from .test_catch_up import Twins, keys_of, layer_of, loss_of

pytestmark = pytest.mark.usefixtures("engine")


def saved_and_loaded(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "torch.save": saved_and_loaded,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.pairs
@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_copy_of_the_layer_alone(name, way):
    twins = Twins(name)
    twins.steps(12)
    copied = COPIES[way](twins.layer)
    torch.testing.assert_close(copied.weight, twins.dense, **twins.close)
    twins.step(12)
    twins.check_all()


@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_state_of_the_optimizer_alone(name):
    twins = Twins(name)
    twins.steps(5)
    states = [copy.deepcopy(o.state_dict()) for o in (twins.ours, twins.theirs)]
    twins.steps(5, 12)
    for optimizer, state in zip((twins.ours, twins.theirs), states, strict=True):
        optimizer.load_state_dict(state)
    torch.testing.assert_close(twins.layer.weight.detach(), twins.dense.detach(), **twins.close)
    twins.steps(12, 20)
    twins.check_all()


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_new_key_after_a_dense_gradient_under_momentum(nesterov):
    def layer_of():
        return sparsekit.All2AllDenseEmbedding(
            20, 3, 1, 1, dynamic_input=True, dtype=torch.float64, name="new keys"
        )

    layer, settings = layer_of(), {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    layer(torch.tensor([1]))
    dense = torch.nn.Parameter(layer.weight.detach().clone())
    ours = optim.SGD([layer.weight], mode="catch_up", **settings)
    theirs = torch.optim.SGD([dense], **settings)
    for weight in (layer.weight, dense):
        weight.grad = torch.ones_like(weight)  # like the gradient of a penalty on all rows
    for step in range(10):
        ours.step()
        theirs.step()
        keys = torch.tensor([1, 7] if step >= 5 else [1])
        if step == 5:  # the row has moved, but its new key starts from the key's initial vector
            with torch.no_grad():
                dense[1] = layer_of().eval()(torch.tensor([7]))[0]
        found = layer(keys)
        torch.testing.assert_close(found, dense[: len(keys)], rtol=0, atol=1e-12)
        ours.zero_grad()
        theirs.zero_grad()
        (found**2).sum().backward()
        (dense[: len(keys)] ** 2).sum().backward()
    assert same_bits(layer.table.keys(), torch.tensor([1, 7]))
    ours.catch_up(layer.weight)
    torch.testing.assert_close(layer.weight[:2], dense[:2], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_dense_gradient_leaves_no_row_late(name):
    twins = Twins(name)
    twins.steps(3)
    for weight in (twins.layer.weight, twins.dense):
        weight.grad = torch.ones_like(weight)
    for optimizer in (twins.ours, twins.theirs):
        optimizer.step()
    torch.testing.assert_close(twins.layer.weight, twins.dense, **twins.close)
    assert twins.layer.weight.before_read is None
    assert len(twins.ours._missed[twins.layer.weight].numbers) == 0


class NothingRead(TorchDispatchMode):
    """Mode that raises if a tensor's value is read, as the host would then wait for a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ALL_ROWS)
def test_only_the_first_step_reads_a_tensor(name):
    twins = Twins(name)
    twins.steps(1)
    for _ in range(3):
        with NothingRead():
            twins.ours.step()
        twins.theirs.step()
    twins.check_all()


class CountingLock:
    """Lock that only counts how often it is held."""

    depth = 0

    def __enter__(self):
        self.depth += 1

    def __exit__(self, *error):
        self.depth -= 1


def test_rows_move_under_the_lock_and_without_a_graph(monkeypatch):
    """Updates hold the lock, since threads in evaluation may let rows catch up at any time."""
    twins, held = Twins("Adam"), []
    twins.ours._lock = CountingLock()
    for name in ("update_rows_", "catch_up_rows_"):
        op = getattr(sparsekit.ops, name)

        def recorded(*arguments, op=op, **options):
            held.append((op.__name__, twins.ours._lock.depth > 0, torch.is_grad_enabled()))
            op(*arguments, **options)

        monkeypatch.setattr(sparsekit.ops, name, recorded)
    twins.steps(2)
    twins.ours.catch_up(twins.layer.weight)
    assert set(held) == {("update_rows_", True, False), ("catch_up_rows_", True, False)}


@pytest.mark.parametrize("way", ["state_dict", "__getstate__", "load_state_dict"])
def test_rows_of_all_parameters_catch_up(way):
    found = []
    for mode in ("catch_up", "sweep"):
        layers = layer_of(), layer_of()
        optimizer = optim.Adam([layer.weight for layer in layers], lr=0.1, mode=mode)
        arguments = [optimizer.state_dict()] if way == "load_state_dict" else []
        for step in range(5):
            optimizer.zero_grad()
            sum(loss_of(layers[i](keys_of(step + i)), step) for i in range(2)).backward()
            optimizer.step()
        assert mode == "catch_up" or all(layer.weight.before_read is None for layer in layers)
        getattr(optimizer, way)(*arguments)
        assert all(layer.weight.before_read is None for layer in layers)
        found.append([layer.weight.detach() for layer in layers])
    assert all(map(same_bits, *found))


@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("SGD catch_up", {4: {"momentum": 0.0}, 8: {"momentum": 0.5}}),
        ("SGD catch_up", {4: {"mode": "touched"}, 8: {"mode": "catch_up"}}),
        ("Adam", {4: {"betas": (0.5, 0.9)}, 8: {"eps": 0.1, "eps_convention": "tensorflow"}}),
        ("Adam", {4: {"mode": "sweep"}, 8: {"mode": "catch_up"}}),
    ],
)
@pytest.mark.parametrize("fused", [False, True])
def test_settings_that_change_for_several_layers(name, changes, fused):
    layers, twins = ([layer_of(), layer_of()] for _ in range(2))
    optimizers = [make(name, [layer.weight for layer in layers])]
    if fused:
        optim.fuse_in_backward(optimizers[0], torch.nn.ModuleList(layers))
    optimizers += [make(name, [twin.weight]) for twin in twins]
    for step in range(12):
        for optimizer in optimizers:
            optimizer.param_groups[0].update(changes.get(step, {}))
            optimizer.zero_grad()
        for each in (layers, twins):
            sum(loss_of(each[i](keys_of(step + i)), step) for i in range(2)).backward()
        for optimizer in optimizers:
            optimizer.step()
    for optimizer in optimizers:
        optimizer.state_dict()
    for layer, twin in zip(layers, twins, strict=True):
        assert same_bits(layer.weight, twin.weight)


@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_a_step_that_fails_can_be_repeated(name, monkeypatch):
    twins = Twins(name)
    twins.steps(5)

    def fail(*arguments, **options):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(sparsekit.ops, "update_rows_", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            twins.ours.step()
    twins.ours.step()
    twins.theirs.step()
    twins.check_all()


def test_a_mode_that_changes_while_rows_are_late():
    twins = Twins("SGD catch_up")
    twins.steps(10)
    before = twins.dense.detach().clone()
    twins.ours.param_groups[0]["mode"] = "touched"
    twins.step(10, torch.tensor([3]))
    found = twins.layer(torch.arange(len(before)))
    others = [row for row in range(len(before)) if row != 3]
    torch.testing.assert_close(found[others], before[others], **twins.close)
    torch.testing.assert_close(found[3], twins.dense[3], **twins.close)


@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_a_row_that_misses_more_steps_than_there_is_room_for_at_first(name):
    twins = Twins(name)
    twins.step(0)
    for step in range(1, 70):  # at first there is room for 64 steps
        twins.step(step, torch.tensor([0]))
    twins.check_all()
