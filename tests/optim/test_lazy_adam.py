"""LazyAdam against the formula in plain torch and against torch.optim.SparseAdam."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsekit.optim import LazyAdam

pytestmark = pytest.mark.usefixtures("engine")

ROWS, DIM, STEPS = 12, 5, 50
NEVER = 11  # a row that no gradient touches
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def start(dtype=torch.float64, shape=(ROWS, DIM), seed=0):
    weight = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return torch.nn.Parameter(weight.to(dtype))


def sparse(rows, values, num_rows=ROWS):
    rows = torch.as_tensor(rows).unsqueeze(0)
    size = (num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(rows, values, size, check_invariants=True)


def gradients(dtype=torch.float64, steps=STEPS):
    """Row 0 in every step, row 1 in the first and the last, others now and then; repeats."""
    for step in range(steps):
        rows = torch.randint(2, NEVER, (6,), generator=generator(step)).tolist()
        rows += [0, 1] if step in (0, steps - 1) else [0]
        values = torch.randn(len(rows), DIM, generator=generator(100 + step), dtype=torch.float64)
        yield sparse(rows, values.to(dtype))


class Reference:
    """The formula of LazyAdam's docstring, in float64; weights are rounded to dtype each step."""

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
            # Repeated rows add up exactly, and the sum is rounded to the gradient's dtype.
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


def run(optimizer, parameter, grads):
    for grad in grads:
        parameter.grad = grad
        optimizer.step()


def same_bits(one, other):
    assert one.dtype == other.dtype
    return torch.equal(one.detach().view(torch.uint8), other.detach().view(torch.uint8))


SETTINGS = [{}, {"lr": 0.3, "betas": (0.5, 0.75), "eps": 1e-3}, {"lr": 0.1, "betas": (0.0, 0.0)}]


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
    # Rounded to the same neighbour but for the odd tie.
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


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dense_gradients_of_any_shape(shape, dtype):
    weight = start(dtype, shape)
    expected = Reference(weight.detach().reshape(-1), lr=0.1)
    grads = [start(dtype, shape, seed).detach() for seed in range(1, 6)]
    run(LazyAdam([weight], lr=0.1), weight, grads)
    for grad in grads:
        expected.step(grad.reshape(-1))
    tolerance = TOLERANCE.get(dtype, 2**-6)
    assert weight.shape == shape
    torch.testing.assert_close(
        weight.detach().double().reshape(-1), expected.weight, rtol=0, atol=tolerance
    )


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


def test_empty_gradient_counts_as_a_step_and_moves_nothing():
    weight, before = start(), start()
    optimizer = LazyAdam([weight])
    run(
        optimizer, weight, [sparse(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM).double())]
    )
    assert same_bits(weight, before)
    assert optimizer.state[weight]["step"] == 1


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


def test_parameter_groups_each_have_their_settings():
    settings = [{"lr": 0.5}, {"betas": (0.1, 0.2), "eps": 0.1}, {}]
    weights = [start(seed=seed) for seed in range(3)]
    references = [
        Reference(weight, **{"lr": 0.01, **own})
        for weight, own in zip(weights, settings, strict=True)
    ]
    groups = [{"params": [w], **own} for w, own in zip(weights, settings, strict=True)]
    optimizer = LazyAdam(groups[:2], lr=0.01)
    optimizer.add_param_group(groups[2])
    for grad in gradients(steps=5):
        for weight, reference in zip(weights, references, strict=True):
            weight.grad = grad
            reference.step(grad)
        optimizer.step()
    for weight, reference in zip(weights, references, strict=True):
        torch.testing.assert_close(weight.detach(), reference.weight, rtol=0, atol=1e-12)


def test_closure():
    weight = start()
    optimizer = LazyAdam([weight], lr=0.1)

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(20)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == start().square().sum().item()
    assert optimizer.step() is None


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy"])
def test_resumed_run_equals_an_uninterrupted_one(dtype, way):
    grads = list(gradients(dtype, 10))
    whole = start(dtype)
    run(LazyAdam([whole], lr=0.1), whole, grads)

    first = start(dtype)
    optimizer = LazyAdam([first], lr=0.1)
    run(optimizer, first, grads[:5])
    if way == "deepcopy":
        second, resumed = copy.deepcopy((first, optimizer))
    else:
        second = torch.nn.Parameter(first.detach().clone())
        resumed = LazyAdam([second], lr=7)
        state = optimizer.state_dict()
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        resumed.load_state_dict(state)
    run(resumed, second, grads[5:])
    assert same_bits(second, whole)


@pytest.mark.parametrize("saved", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loaded", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_state_of_another_dtype_can_be_loaded(saved, loaded):
    weight = start(saved)
    optimizer = LazyAdam([weight])
    run(optimizer, weight, gradients(saved, 3))
    other = torch.nn.Parameter(weight.detach().to(loaded))
    resumed = LazyAdam([other])
    resumed.load_state_dict(optimizer.state_dict())
    run(resumed, other, gradients(loaded, 2))
    assert resumed.state[other]["step"] == 5
    wide = torch.float64 if loaded == torch.float64 else torch.float32
    assert resumed.state[other]["exp_avg"].dtype == wide


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
    elsewhere = torch.nn.Parameter(weight.detach().to("meta"))  # stands for another device
    resumed = LazyAdam([elsewhere])
    resumed.load_state_dict(optimizer.state_dict())
    for value in resumed.state[elsewhere].values():
        assert value.device == elsewhere.device
    assert resumed.state[elsewhere]["step"].dtype == torch.int64


def test_backward_notices_that_step_has_changed_a_weight_it_needs():
    weight, x = start(), torch.ones(ROWS, dtype=torch.float64, requires_grad=True)
    optimizer = LazyAdam([weight])
    out = x @ weight  # the gradient for x reads weight
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
    optimizer = LazyAdam([good, weight])
    with pytest.raises(error, match="LazyAdam: .*" + message):
        optimizer.step()
    assert torch.equal(good, torch.ones(2, 2))
    assert torch.equal(weight, before)
    assert weight not in optimizer.state


def test_a_step_that_fails_does_not_count():
    weight = start(torch.float32)
    optimizer = LazyAdam([weight])
    values = torch.ones(1, DIM)
    weight.grad = sparse([0], values)
    optimizer.step()
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[ROWS]]), values, (ROWS, DIM), check_invariants=False, is_coalesced=True
    )
    with pytest.raises(IndexError, match=rf"rows\[0\] is {ROWS}"):
        optimizer.step()
    assert optimizer.state[weight]["step"] == 1
