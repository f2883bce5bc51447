"""Optimizers that skip rows without a gradient equal torch's own, or formulas in NumPy."""

import numpy as np
import pytest
import torch
from conftest import same_bits

from sparsekit import optim

from .cases import DIM, NEVER, ROWS, STEPS, TOLERANCE, TOUCHED, gradients, make, start

pytestmark = pytest.mark.usefixtures("engine")

DTYPES = [torch.float64, torch.float32]


class RowByRow:
    """A torch optimizer with one parameter per row, so that it skips rows without a gradient."""

    def __init__(self, weight, kind, sparse_rows=False, **settings):
        self.rows = [torch.nn.Parameter(row.detach().clone()[None]) for row in weight]
        self.optimizer = kind(self.rows, **settings)
        self.sparse_rows = sparse_rows

    def step(self, grad):
        grad = grad.coalesce()
        for parameter in self.rows:
            parameter.grad = None
        for row, value in zip(grad.indices()[0].tolist(), grad.values(), strict=True):
            own = value[None]
            self.rows[row].grad = own.to_sparse(1) if self.sparse_rows else own
        self.optimizer.step()

    @property
    def weight(self):
        return torch.cat([row.detach() for row in self.rows])


class Whole:
    """A torch optimizer that accepts sparse gradients."""

    def __init__(self, weight, kind, **settings):
        self.weight = torch.nn.Parameter(weight.detach().clone())
        self.optimizer = kind([self.weight], **settings)

    def step(self, grad):
        self.weight.grad = grad
        self.optimizer.step()


class Numpy:
    """A formula in NumPy and float64, applied to the rows that have a gradient."""

    def __init__(self, weight, states, formula):
        self.values = weight.detach().double().numpy().copy()
        self.states = [np.full_like(self.values, value) for value in states]
        self.formula = formula
        self.t = 0

    def step(self, grad):
        self.t += 1
        grad = grad.coalesce()
        for row, g in zip(grad.indices()[0].tolist(), grad.values().double().numpy(), strict=True):
            own = [state[row] for state in self.states]
            self.values[row], new = self.formula(self.values[row], g, own, self.t)
            for state, value in zip(self.states, new, strict=True):
                state[row] = value

    @property
    def weight(self):
        return torch.from_numpy(self.values)


def row_wise_adagrad(w, g, states, t, keep=1):
    total = states[0] + (g * g).sum() / len(g)
    return keep * w - 0.1 * g / (np.sqrt(total) + 1e-10), [total]


def decoupled_adagrad(w, g, states, t):
    total, lr = states[0] + g * g, 0.1 / (1 + 0.05 * (t - 1))
    w = w - lr * 0.1 * w
    return w - lr * g / (np.sqrt(total) + 1e-10), [total]


def decoupled_rms_prop(w, g, states, t):
    square = 0.99 * states[0] + 0.01 * g * g
    w = w - 0.1 * 0.1 * w
    return w - 0.1 * g / (np.sqrt(square) + 1e-8), [square]


def tensorflow_rms_prop(momentum):
    def step(w, g, states, t):
        square = states[0] * 0.9 + g * g * 0.1
        moved = momentum * states[1] + 0.1 * g / np.sqrt(square + 1e-10)
        return w - moved, [square, moved]

    return step


def ftrl(lr, l1, l2, power):
    def step(w, g, states, t):
        n, z = states
        sigma = ((n + g * g) ** power - n**power) / lr
        n, z = n + g * g, z + g - sigma * w
        eta = lr / n**power  # one rate per weight
        return np.where(np.abs(z) <= l1, 0, -(z - np.sign(z) * l1) / (1 / eta + 2 * l2)), [n, z]

    return step


def lazy_adam(eps, weight_decay=0.0, amsgrad=False):
    def step(w, g, states, t):
        m, v = 0.9 * states[0] + 0.1 * g, 0.999 * states[1] + 0.001 * g * g
        largest = np.maximum(states[2], v)
        bottom = np.sqrt(largest if amsgrad else v) + eps
        w = w - 0.1 * weight_decay * w
        return w - 0.1 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t) * m / bottom, [m, v, largest]

    return step


ADAM = {"lr": 0.1, "betas": (0.9, 0.999)}
ADAMW = {"eps": 1e-3, "weight_decay": 0.1, "amsgrad": True, "maximize": True}
L2 = {"lr": 0.1, "weight_decay": 0.1, "maximize": True}
DECOUPLED = {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True}
RMS = {"lr": 0.1, "form": "tensorflow"}
# Our optimizer, its settings, and the reference to compare it with.
CASES = {
    "SGD": (optim.SGD, {"lr": 0.1}, lambda w: RowByRow(w, torch.optim.SGD, lr=0.1)),
    "SGD weight decay": (
        optim.SGD,
        {"lr": 0.1, "weight_decay": 0.1},
        lambda w: RowByRow(w, torch.optim.SGD, lr=0.1, weight_decay=0.1),
    ),
    "SGD maximize": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "maximize": True},
        lambda w: RowByRow(
            w, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, maximize=True
        ),
    ),
    "SGD momentum": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        lambda w: RowByRow(w, torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "SGD nesterov": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True},
        lambda w: RowByRow(w, torch.optim.SGD, lr=0.1, momentum=0.8, nesterov=True),
    ),
    "LazyAdam": (optim.LazyAdam, ADAM, lambda w: Whole(w, torch.optim.SparseAdam, **ADAM)),
    "LazyAdam maximize": (
        optim.LazyAdam,
        {**ADAM, "maximize": True},
        lambda w: Whole(w, torch.optim.SparseAdam, **ADAM, maximize=True),
    ),
    "LazyAdam eps of torch": (
        optim.LazyAdam,
        {**ADAM, "eps": 1e-2, "eps_convention": "torch", "bias_correction": "per_row"},
        lambda w: RowByRow(w, torch.optim.Adam, **ADAM, eps=1e-2),
    ),
    "LazyAdam weight decay": (
        optim.LazyAdam,
        {**ADAM, "eps": 1e-3, "weight_decay": 0.1},
        lambda w: Numpy(w, [0, 0, 0], lazy_adam(1e-3, weight_decay=0.1)),
    ),
    "LazyAdam amsgrad": (
        optim.LazyAdam,
        {**ADAM, "eps": 1e-3, "amsgrad": True},
        lambda w: Numpy(w, [0, 0, 0], lazy_adam(1e-3, amsgrad=True)),
    ),
    "LazyAdam per row": (
        optim.LazyAdam,
        {**ADAM, "bias_correction": "per_row"},
        lambda w: RowByRow(w, torch.optim.SparseAdam, sparse_rows=True, **ADAM),
    ),
    "AdamW per row": (
        optim.LazyAdam,
        {**ADAM, **ADAMW, "bias_correction": "per_row", "eps_convention": "torch"},
        lambda w: RowByRow(w, torch.optim.AdamW, **ADAM, **ADAMW),
    ),
    "Adagrad": (
        optim.Adagrad,
        {"lr": 0.1, "lr_decay": 0.05, "initial_accumulator_value": 0.2},
        lambda w: Whole(
            w, torch.optim.Adagrad, lr=0.1, lr_decay=0.05, initial_accumulator_value=0.2
        ),
    ),
    "Adagrad L2": (
        optim.Adagrad,
        L2,
        lambda w: RowByRow(w, torch.optim.Adagrad, **L2),
    ),
    "Adagrad decoupled": (
        optim.Adagrad,
        {**DECOUPLED, "lr_decay": 0.05},
        lambda w: Numpy(w, [0], decoupled_adagrad),
    ),
    "RowWiseAdagrad": (
        optim.RowWiseAdagrad,
        {"lr": 0.1},
        lambda w: Numpy(w, [0], row_wise_adagrad),
    ),
    "RowWiseAdagrad L2": (
        optim.RowWiseAdagrad,
        {"lr": 0.1, "weight_decay": 0.1},
        lambda w: Numpy(w, [0], lambda w, g, s, t: row_wise_adagrad(w, g + 0.1 * w, s, t)),
    ),
    "RowWiseAdagrad decoupled": (
        optim.RowWiseAdagrad,
        DECOUPLED,
        lambda w: Numpy(w, [0], lambda w, g, s, t: row_wise_adagrad(w, g, s, t, keep=0.99)),
    ),
    "RMSProp L2": (
        optim.RMSProp,
        {**L2, "momentum": 0.5},
        lambda w: RowByRow(w, torch.optim.RMSprop, **L2, momentum=0.5),
    ),
    "RMSProp decoupled": (
        optim.RMSProp,
        DECOUPLED,
        lambda w: Numpy(w, [0], decoupled_rms_prop),
    ),
    "RMSProp": (
        optim.RMSProp,
        {"lr": 0.1, "eps": 1e-3},
        lambda w: RowByRow(w, torch.optim.RMSprop, lr=0.1, eps=1e-3),
    ),
    "RMSProp momentum": (
        optim.RMSProp,
        {"lr": 0.1, "momentum": 0.7},
        lambda w: RowByRow(w, torch.optim.RMSprop, lr=0.1, momentum=0.7),
    ),
    "RMSProp of TensorFlow": (
        optim.RMSProp,
        RMS,
        lambda w: Numpy(w, [1, 0], tensorflow_rms_prop(0)),
    ),
    "RMSProp of TensorFlow, L2": (
        optim.RMSProp,
        {**RMS, "weight_decay": 0.1},
        lambda w: Numpy(w, [1, 0], lambda w, g, s, t: tensorflow_rms_prop(0)(w, g + 0.1 * w, s, t)),
    ),
    "RMSProp of TensorFlow, momentum": (
        optim.RMSProp,
        {**RMS, "momentum": 0.7},
        lambda w: Numpy(w, [1, 0], tensorflow_rms_prop(0.7)),
    ),
    "Ftrl": (
        optim.Ftrl,
        {"lr": 0.5, "l1": 0.5, "l2": 0.25},
        lambda w: Numpy(w, [0.1, 0], ftrl(0.5, 0.5, 0.25, 0.5)),
    ),
    "Ftrl power": (
        optim.Ftrl,
        {"lr": 0.5, "l1": 0.5, "l2": 0.25, "lr_power": -0.7},
        lambda w: Numpy(w, [0.1, 0], ftrl(0.5, 0.5, 0.25, 0.7)),
    ),
}


# torch warns that its own Adagrad creates a sparse tensor without setting check_invariants.
@pytest.mark.pairs
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("coalesced", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_fifty_steps(case, coalesced, dtype):
    kind, settings, reference = CASES[case]
    weight = start(dtype)
    optimizer, expected = kind([weight], **settings), reference(weight)
    for grad in gradients(dtype):
        weight.grad = grad.coalesce() if coalesced else grad
        before = weight.detach().clone()
        optimizer.step()
        expected.step(grad)
        close = {"rtol": 0, "atol": TOLERANCE[dtype], "check_dtype": False}
        torch.testing.assert_close(weight.detach(), expected.weight.detach(), **close)
        idle = sorted(set(range(ROWS)) - set(grad._indices()[0].tolist()))
        assert same_bits(weight[idle], before[idle])
    assert optimizer.state[weight]["step"] == STEPS


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TOUCHED)
def test_states_of_untouched_rows_keep_their_bits(name, dtype):
    weight = start(dtype)
    optimizer = make(name, [weight])
    grads = list(gradients(dtype, 10))
    for grad in grads[:5]:
        weight.grad = grad
        optimizer.step()
    rows = torch.tensor([3, 7])
    idle = [row for row in range(ROWS) if row not in (3, 7)]
    state = {k: v.clone() for k, v in optimizer.state[weight].items() if k != "step"}
    weight.grad = torch.sparse_coo_tensor(
        rows[None], torch.ones(2, DIM, dtype=dtype), weight.shape, check_invariants=True
    )
    optimizer.step()
    for name_of_state, before in state.items():
        now = optimizer.state[weight][name_of_state]
        assert same_bits(now[idle], before[idle])
        assert (now[rows] != before[rows]).all()


@pytest.mark.parametrize("name", TOUCHED)
def test_a_dense_gradient_is_one_of_all_rows(name):
    weight, other = start(), start()
    optimizers = make(name, [weight]), make(name, [other])
    for seed in range(1, 6):
        grad = start(seed=seed).detach()
        weight.grad = grad
        other.grad = torch.sparse_coo_tensor(
            torch.arange(ROWS)[None], grad, grad.shape, check_invariants=True
        )
        for optimizer in optimizers:
            optimizer.step()
    assert same_bits(weight, other)


def test_ftrl_gives_exact_zeros():
    weight = start()
    optimizer = optim.Ftrl([weight], lr=0.1, l1=2.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        # Columns 0 and 1 have a signal, the others only noise.
        grad = 0.1 * torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
        grad[:, :2] += 1
        weight.grad = grad
        optimizer.step()
    assert (weight[:, 2:] == 0).double().mean() > 0.8
    assert (weight[:, :2] != 0).all()


def test_which_convention_for_l2():
    # The loss has the term l2 w^2, so 2 l2 is added to 1 / eta; the paper adds l2.
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = optim.Ftrl([weight], lr=1.0, l2=3.0, initial_accumulator_value=0.0)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert weight.item() == pytest.approx(-2 / (2 + 2 * 3), rel=1e-12)


@pytest.mark.parametrize("name", TOUCHED)
def test_untouched_weights_stay_in_bfloat16(name):
    weight = start(torch.bfloat16)
    before = weight.detach().clone()
    optimizer = make(name, [weight], stochastic_rounding=True, seed=3)
    assert optimizer.param_groups[0]["stochastic_rounding"]
    assert optimizer.param_groups[0]["seed"] == 3
    for grad in gradients(torch.bfloat16, 10):
        weight.grad = grad
        optimizer.step()
    assert same_bits(weight[NEVER], before[NEVER])
    assert (weight[0] != before[0]).any()


def test_stochastic_rounding_keeps_small_steps():
    def mean(**keywords):
        weight = torch.nn.Parameter(torch.ones(400, 8, dtype=torch.bfloat16))
        optimizer = optim.SGD([weight], lr=2.0**-11, **keywords)
        for _ in range(64):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        return weight.float().mean().item()

    assert mean() == 1  # rounding removes every step
    assert mean(stochastic_rounding=True) == pytest.approx(1 - 64 * 2.0**-11, abs=2e-3)
    assert mean(stochastic_rounding=True, seed=1) == mean(stochastic_rounding=True, seed=1)
    assert mean(stochastic_rounding=True, seed=1) != mean(stochastic_rounding=True, seed=2)
