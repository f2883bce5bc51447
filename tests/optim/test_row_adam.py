"""PartialRowWiseAdam and LazyLAMB equal their formulas, computed one number at a time."""

import math

import pytest
import torch
from conftest import generator, same_bits

from sparsekit.optim import LazyAdam, LazyLAMB, PartialRowWiseAdam

from .cases import make, run, sparse, start

pytestmark = pytest.mark.usefixtures("engine")

ROWS, DIM, STEPS, SEEDS = 7, 3, 20, 12
LR, BETA1, BETA2, EPS = 0.1, 0.8, 0.95, 1e-3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


class Row:
    """A row with its moments as Python floats."""

    def __init__(self, weight, kind, weight_decay):
        self.w, self.kind, self.decay = weight.tolist(), kind, weight_decay
        self.m, self.steps = [0.0] * DIM, 0
        self.v = [0.0] * (1 if kind is PartialRowWiseAdam else DIM)

    def step(self, g, t):
        squares = [x * x for x in g]
        if self.kind is PartialRowWiseAdam:
            squares = [sum(squares) / DIM]
        self.m = [BETA1 * m + (1 - BETA1) * x for m, x in zip(self.m, g, strict=True)]
        self.v = [BETA2 * v + (1 - BETA2) * x for v, x in zip(self.v, squares, strict=True)]
        roots = [math.sqrt(v / (1 - BETA2**t)) + EPS for v in self.v] * (DIM // len(self.v))
        u = [m / (1 - BETA1**t) / root for m, root in zip(self.m, roots, strict=True)]
        u = [x + self.decay * w for x, w in zip(u, self.w, strict=True)]
        ratio = 1.0
        if self.kind is LazyLAMB and any(self.w) and any(u):
            ratio = math.hypot(*self.w) / math.hypot(*u)
        self.w = [w - LR * ratio * x for w, x in zip(self.w, u, strict=True)]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("bias_correction", ["global", "per_row"])
@pytest.mark.parametrize("kind", [PartialRowWiseAdam, LazyLAMB])
def test_twenty_steps(kind, bias_correction, dtype):
    """The steps are right for rows that are repeated, all zero, rarely updated or never updated."""
    weights = [start(dtype, (ROWS, DIM), seed) for seed in range(SEEDS)]
    for weight in weights:
        weight.data[1] = 0
    decay, per_row = 0.1, bias_correction == "per_row"
    optimizer = kind(
        weights, LR, (BETA1, BETA2), EPS, weight_decay=decay, bias_correction=bias_correction
    )
    expected = [[Row(row, kind, decay) for row in weight.detach()] for weight in weights]
    random = generator(0)
    for t in range(1, STEPS + 1):
        before = []
        for weight, model in zip(weights, expected, strict=True):
            before.append([tensor.clone() for tensor in states(optimizer, weight)])
            rows = torch.randint(0, ROWS - 1, (4,), generator=random)
            values = torch.randn(4, DIM, generator=random, dtype=torch.float64).to(dtype)
            weight.grad = sparse(rows, values, ROWS)
            total = weight.grad.double().to_dense()
            for row in set(rows.tolist()):
                model[row].steps += 1
                model[row].step(total[row].tolist(), model[row].steps if per_row else t)
        optimizer.step()
        for weight, then in zip(weights, before, strict=True):
            idle = [row for row in range(ROWS) if row not in weight.grad._indices()[0].tolist()]
            assert idle
            for now, old in zip(states(optimizer, weight)[: len(then)], then, strict=True):
                assert same_bits(now[idle], old[idle])
    for weight, model in zip(weights, expected, strict=True):
        state = optimizer.state[weight]
        for now, wanted in (
            (weight.detach(), [row.w for row in model]),
            (state["exp_avg"], [row.m for row in model]),
            (state["exp_avg_sq"].view(ROWS, -1), [row.v for row in model]),
        ):
            wanted = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(now.double(), wanted, rtol=0, atol=TOLERANCE[dtype])
        if per_row:
            assert state["row_step"].tolist() == [row.steps for row in model]


def states(optimizer, weight):
    """Return the weight and, after the first step, the states."""
    kept = optimizer.state[weight]
    return [weight.detach(), *(kept[name] for name in sorted(kept) if name != "step")]


def test_partial_states_have_one_second_moment_for_a_row():
    for shape in ((4, 3), (4, 1, 3), (4,), (0, 2, 3)):
        weight = start(shape=shape)
        optimizer = PartialRowWiseAdam([weight], betas=(0.5, 0.75))
        weight.grad = torch.full_like(weight, 2.0)
        optimizer.step()
        state = optimizer.state[weight]
        assert state["exp_avg"].shape == shape
        assert same_bits(state["exp_avg"], torch.ones_like(weight))
        assert state["exp_avg_sq"].tolist() == [1.0] * shape[0]


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 2), (4,)])
def test_a_row_moves_by_lr_of_its_norm_under_lamb(shape):
    weight = start(shape=shape)
    before = weight.detach().clone()
    optimizer = LazyLAMB([weight], lr=0.25, weight_decay=0.5)
    for seed in range(1, 4):
        weight.grad = start(shape=shape, seed=seed).detach()
        optimizer.step()
        norms = before.view(4, -1).norm(dim=1)
        moved = (weight.detach() - before).view(4, -1).norm(dim=1)
        torch.testing.assert_close(moved, 0.25 * norms, rtol=1e-12, atol=0)
        before = weight.detach().clone()


def test_rows_of_zeros_under_lamb():
    """Rows of zeros move as under Adam, and without a gradient nothing is divided by 0."""
    weight = torch.nn.Parameter(torch.zeros(3, 2, dtype=torch.float64))
    optimizer = LazyLAMB([weight], lr=0.25, eps=0.5)
    weight.grad = torch.tensor([[0.5, -0.5], [0.0, 0.0], [1.5, 0.0]], dtype=torch.float64)
    optimizer.step()
    wanted = torch.tensor([[-0.125, 0.125], [0, 0], [-0.1875, 0]], dtype=torch.float64)
    torch.testing.assert_close(weight.detach(), wanted, rtol=1e-12, atol=0)
    with torch.no_grad():
        weight[1] = 1
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert weight[1].tolist() == [1, 1]


@pytest.mark.parametrize("name", ["PartialRowWiseAdam", "LazyLAMB"])
def test_a_nan_spoils_its_row_only(name):
    weight = start(shape=(3, 20))
    optimizer = make(name, [weight])
    grad = torch.ones_like(weight)
    grad[1, 17] = math.nan
    run(optimizer, weight, [grad])
    assert weight.isnan().all(1).tolist() == [False, True, False]
    assert not weight[::2].isnan().any()


def test_the_moments_of_another_adam():
    weight, other = start(), start()
    theirs = LazyAdam([weight])
    run(theirs, weight, [torch.ones_like(weight)])
    with pytest.raises(ValueError, match=r"exp_avg_sq must have shape \(12,\), got \(12, 5\)"):
        PartialRowWiseAdam([other]).load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="the state to load has amsgrad=True"):
        LazyLAMB([other]).load_state_dict(LazyAdam([weight], amsgrad=True).state_dict())
