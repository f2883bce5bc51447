"""LazyAdam equals the formula in plain torch, and torch.optim.SparseAdam."""

import math

import pytest
import torch
from conftest import same_bits
from hypothesis import given
from hypothesis import strategies as st

import sparsekit
from sparsekit.optim import LazyAdam

from .cases import DIM, ROWS, STEPS, TOLERANCE, gradients, run, sparse, start

pytestmark = pytest.mark.usefixtures("engine")


class Reference:
    """The formula of LazyAdam's docstring in float64; each step rounds the weights to dtype."""

    def __init__(self, weight, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        self.dtype = weight.dtype
        self.weight = weight.detach().to(torch.float64, copy=True)
        self.m, self.v = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.t, self.lr, self.betas, self.eps = 0, lr, betas, eps

    def step(self, grad):
        self.t += 1
        touched = torch.ones(self.weight.shape[:1], dtype=torch.bool)
        if grad.is_sparse:
            touched.zero_()
            touched[grad._indices()[0]] = True
            # Repeated rows add up exactly; then the sum is rounded to the gradient's dtype.
            grad = grad.to(torch.float64).coalesce().to_dense().to(grad.dtype)
        g = grad.to(torch.float64)
        beta1, beta2 = self.betas
        m = beta1 * self.m + (1 - beta1) * g
        v = beta2 * self.v + (1 - beta2) * g * g
        rate = self.lr * math.sqrt(1 - beta2**self.t) / (1 - beta1**self.t)
        moved = self.weight - rate * m / (v.sqrt() + self.eps)
        keep = touched.view(-1, *[1] * (self.weight.dim() - 1))
        self.weight = torch.where(keep, moved.to(self.dtype).to(torch.float64), self.weight)
        self.m, self.v = torch.where(keep, m, self.m), torch.where(keep, v, self.v)


SETTINGS = [{}, {"lr": 0.3, "betas": (0.5, 0.75), "eps": 1e-3}, {"lr": 0.1, "betas": (0.0, 0.0)}]


@pytest.mark.pairs
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("coalesced", [False, True])
def test_equals_reference(dtype, settings, coalesced):
    weight = start(dtype)
    reference = Reference(weight, **settings)
    optimizer = LazyAdam([weight], **settings)
    for grad in gradients(dtype):
        weight.grad = grad.coalesce() if coalesced else grad
        optimizer.step()
        reference.step(grad)
        close = {"rtol": 0, "atol": TOLERANCE[dtype], "check_dtype": False}
        torch.testing.assert_close(weight, reference.weight, **close)
    state = optimizer.state[weight]
    torch.testing.assert_close(state["exp_avg"], reference.m, **close)
    torch.testing.assert_close(state["exp_avg_sq"], reference.v, **close)
    assert state["step"] == STEPS


def test_bfloat16_rounds_only_the_weight():
    weight = start(torch.bfloat16)
    reference = Reference(weight, lr=0.1)
    optimizer = LazyAdam([weight], lr=0.1)
    for grad in gradients(torch.bfloat16):
        weight.grad = grad
        optimizer.step()
        reference.step(grad)
    state = optimizer.state[weight]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    torch.testing.assert_close(state["exp_avg"].double(), reference.m, rtol=0, atol=1e-5)
    torch.testing.assert_close(state["exp_avg_sq"].double(), reference.v, rtol=0, atol=1e-5)
    # Most elements round to the same neighbour; ties may differ.
    assert (weight.double() == reference.weight).double().mean() > 0.9
    torch.testing.assert_close(weight.double(), reference.weight, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("settings", SETTINGS[:2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_equals_sparse_adam(dtype, settings):
    weight, other = start(dtype), start(dtype)
    run(LazyAdam([weight], **settings), weight, gradients(dtype))
    run(torch.optim.SparseAdam([other], **settings), other, gradients(dtype))
    torch.testing.assert_close(weight, other, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@given(rows=st.lists(st.integers(0, ROWS - 1), max_size=20), steps=st.integers(1, 3))
def test_untouched_rows_keep_their_bits(dtype, rows, steps):
    weight = start(dtype)
    with torch.no_grad():
        weight[:, 0] = -0.0
        weight[:, 1] = math.nan
        weight[:, 2] = 1e-40  # subnormal in float32
    optimizer = LazyAdam([weight], lr=0.1)
    run(optimizer, weight, gradients(dtype, steps))
    state = optimizer.state[weight]
    before = [tensor.detach().clone() for tensor in (weight, state["exp_avg"], state["exp_avg_sq"])]
    run(optimizer, weight, [sparse(rows, torch.ones(len(rows), DIM, dtype=dtype))] * steps)
    untouched = sorted(set(range(ROWS)) - set(rows))
    touched = sorted(set(rows))
    for old, new in zip(before, (weight, state["exp_avg"], state["exp_avg_sq"]), strict=True):
        assert same_bits(old[untouched], new[untouched])
        assert (old[touched, 3:] != new[touched, 3:]).all()


SHAPES = [(), (1,), (7,), (3, 4), (2, 3, 4), (1, 1), (0,), (0, 4), (3, 0)]


def test_dense_gradient_that_is_not_contiguous():
    weight, other = start(), start()
    grad = start(shape=(DIM, ROWS), seed=1).detach()
    run(LazyAdam([weight]), weight, [grad.T])
    run(LazyAdam([other]), other, [grad.T.contiguous()])
    assert torch.equal(weight, other)


@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 2, 3)], ids=str)
def test_sparse_gradients_of_other_shapes(shape):
    weight = start(shape=shape)
    reference = Reference(weight, lr=0.1)
    grads = [sparse([3, 0, 3], start(shape=(3, *shape[1:]), seed=s).detach()) for s in (1, 2)]
    run(LazyAdam([weight], lr=0.1), weight, grads)
    for grad in grads:
        reference.step(grad)
    torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-12)


def test_parameters_without_gradient_are_left_out():
    weight, idle = start(), start()
    optimizer = LazyAdam([weight, idle])
    run(optimizer, weight, gradients(steps=2))
    assert same_bits(idle, start())
    assert idle not in optimizer.state


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    weight, other = start(), start()
    optimizer = LazyAdam([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad(set_to_none=set_to_none)
        torch.nn.functional.embedding(torch.tensor([1, 4, 1]), weight, sparse=True).sum().backward()
        optimizer.step()
    grad = sparse([1, 4], torch.tensor([[2.0], [1.0]]).double().expand(2, DIM))
    run(LazyAdam([other], lr=0.1), other, [grad] * 3)
    torch.testing.assert_close(weight, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_learning_rate_scheduler(tensor_lr):
    weight = start()
    lr = torch.tensor(0.4, dtype=torch.float64) if tensor_lr else 0.4
    optimizer = LazyAdam([weight], lr=lr)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    reference = Reference(weight)
    for t, grad in enumerate(gradients(steps=4)):
        reference.lr = 0.4 * 0.5**t
        reference.step(grad)
        run(optimizer, weight, [grad])
        scheduler.step()
    torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_run_of_sparse_adam_can_be_resumed(dtype):
    grads = list(gradients(dtype, 10))
    whole, first = start(dtype), start(dtype)
    run(torch.optim.SparseAdam([whole], lr=0.1), whole, grads)
    theirs = torch.optim.SparseAdam([first], lr=0.1)
    run(theirs, first, grads[:5])
    ours = LazyAdam([first])
    ours.load_state_dict(theirs.state_dict())
    step = ours.state[first]["step"]
    assert (step.dtype, step.shape) == (torch.int64, ())
    run(ours, first, grads[5:])
    assert ours.state[first]["step"] == 10
    torch.testing.assert_close(first, whole, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", [LazyAdam, torch.optim.SparseAdam])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_loaded_state_is_on_the_device_of_its_parameter(kind, dtype):
    weight = start(dtype)
    optimizer = kind([weight])
    run(optimizer, weight, gradients(dtype, 3))
    elsewhere = torch.nn.Parameter(weight.detach().to("meta"))  # stands in for another device
    resumed = LazyAdam([elsewhere])
    resumed.load_state_dict(optimizer.state_dict())
    for value in resumed.state[elsewhere].values():
        assert value.device == elsewhere.device
    assert resumed.state[elsewhere]["step"].dtype == torch.int64


@pytest.mark.parametrize("settings", [{}, {"bias_correction": "per_row"}])
def test_states_are_made_on_the_device_of_the_parameter(settings, engine):
    if engine != "cpu":
        return  # the host runner takes tensors of the CPU only
    weight = torch.nn.Parameter(torch.empty(3, 2, device="meta"))  # stands in for another device
    optimizer = LazyAdam([weight], **settings)
    run(optimizer, weight, [torch.empty(3, 2, device="meta")])
    assert {value.device.type for value in optimizer.state[weight].values()} == {"meta"}


def test_backward_notices_that_step_has_changed_a_weight_it_needs():
    weight, x = start(), torch.ones(ROWS, dtype=torch.float64, requires_grad=True)
    optimizer = LazyAdam([weight])
    out = x @ weight  # the gradient of x needs weight
    weight.square().sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


BAD = {
    "lr": ({"lr": -0.1}, ValueError, "lr must be >= 0, got -0.1"),
    "lr nan": ({"lr": math.nan}, ValueError, "lr must be >= 0, got nan"),
    "beta 1": ({"betas": (0.9, 1.0)}, ValueError, r"betas must be .* got \(0.9, 1.0\)"),
    "beta -0.1": ({"betas": (-0.1, 0.9)}, ValueError, r"betas must be .* got \(-0.1, 0.9\)"),
    "one beta": ({"betas": 0.9}, ValueError, "betas must be two numbers .* got 0.9"),
    "three betas": ({"betas": (0.1, 0.2, 0.3)}, ValueError, "betas must be two numbers"),
    "eps": ({"eps": -1e-8}, ValueError, "eps must be >= 0, got -1e-08"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    arguments, error, message = BAD[case]
    with pytest.raises(error, match="LazyAdam: " + message):
        LazyAdam([start()], **arguments)


@pytest.mark.parametrize(
    ("weight", "grad", "error", "message"),
    [
        (torch.ones(3, 2).half(), torch.ones(3, 2).half(), TypeError, r"float16 .* \(3, 2\)"),
        (torch.ones(3, 2).T, torch.ones(3, 2).T, ValueError, r"contiguous.*\(2, 3\).*\(1, 2\)"),
        (torch.ones(3, 2), torch.ones(3, 2).to_sparse(), ValueError, r"sparse_dim 2 .*\(3, 2\)"),
    ],
    ids=["dtype", "strides", "sparse_dim"],
)
def test_bad_parameters(weight, grad, error, message):
    good = torch.nn.Parameter(torch.ones(2, 2))
    good.grad = torch.ones(2, 2)
    weight = torch.nn.Parameter(weight)
    weight.grad = grad
    before = weight.detach().clone()
    optimizer = LazyAdam([{"params": [good]}, {"params": [weight], "lr": 0.5}])
    with pytest.raises(error, match="LazyAdam: .*" + message):
        optimizer.step()
    assert torch.equal(good, torch.ones(2, 2))
    assert torch.equal(weight, before)
    assert weight not in optimizer.state


def test_a_new_key_after_a_dense_gradient_has_its_own_vector():
    *layers, other = (sparsekit.Embedding(20, 3, name="moved") for _ in range(3))
    optimizer = LazyAdam([layer.weight for layer in layers])
    for layer in layers:
        layer(torch.tensor([1]))
        layer.weight.grad = torch.ones_like(layer.weight)  # moves rows that have no key, too
    optimizer.step()
    key = torch.tensor([7])
    for layer in layers:
        with torch.no_grad():
            layer.weight[:1].mul_(2)  # from now on, the layer checks what else has been written
        assert torch.equal(layer(key), other(key))
