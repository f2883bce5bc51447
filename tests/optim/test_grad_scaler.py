"""Under torch.amp.GradScaler, LazyAdam gets unscaled gradients and skips infinite steps."""

import math

import pytest
import torch
from conftest import generator, same_bits

import sparsekit
from sparsekit.optim import LazyAdam
from sparsekit.optim.clip import clip_grad_norm_

STEPS, BATCH, SLOTS, NNZ, DIM = 8, 6, 2, 3, 4
SCALE = 2.0**10  # a power of two, as are all later scales, so that nothing is rounded


def batches(dtype):
    random = generator(0)
    for _ in range(STEPS):
        keys = torch.randint(-20, 20, (BATCH, SLOTS, NNZ), generator=random)
        yield keys, torch.randn(BATCH, 1, generator=random).to(dtype)


def build(dtype):
    layer = sparsekit.DistributedEmbedding("mean", 60, DIM, SLOTS, NNZ, dtype=dtype, name="layer")
    torch.manual_seed(0)
    head = torch.nn.Linear(SLOTS * DIM, 1, dtype=dtype)
    return torch.nn.Sequential(layer, torch.nn.Flatten(), head)


def one_optimizer(model):
    return [LazyAdam(model.parameters(), lr=0.05)]


def two_optimizers(model):
    sparse, dense = sparsekit.split_embedding_variable_from_others(model)
    return [LazyAdam(sparse, lr=0.05), torch.optim.SGD(dense, lr=0.1)]


class Training:
    """A model trained with a scaler, or without one if `enabled` is False."""

    def __init__(self, dtype, make_optimizers=one_optimizer, max_norm=None, enabled=True):
        self.model = build(dtype)
        self.optimizers = make_optimizers(self.model)
        self.max_norm = max_norm
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=SCALE, growth_interval=3, enabled=enabled
        )

    @property
    def weight(self):
        return self.model[0].weight

    def backward(self, keys, target):
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = (self.model(keys) - target).square().sum()
        self.scaler.scale(loss).backward()

    def step(self):
        if self.max_norm is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
            clip_grad_norm_(self.model.parameters(), self.max_norm)
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()

    def tensors(self):
        """Return all tensors that a step changes: weights, states and step counters."""
        states = [s for o in self.optimizers for s in o.state.values()]
        tensors = [*self.model.parameters(), *(t for state in states for t in state.values())]
        return [t.detach().clone(memory_format=torch.contiguous_format) for t in tensors]


def assert_same_bits(one, other):
    assert len(one) == len(other)
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("make_optimizers", [one_optimizer, two_optimizers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_scaled_training_equals_unscaled(dtype, make_optimizers, max_norm):
    scaled = Training(dtype, make_optimizers, max_norm)
    plain = Training(dtype, make_optimizers, max_norm, enabled=False)
    for batch in batches(dtype):
        for training in (scaled, plain):
            training.backward(*batch)
        times = scaled.weight.grad._values() / plain.weight.grad._values()
        assert (times == scaled.scaler.get_scale()).all()
        for training in (scaled, plain):
            training.step()
    assert scaled.scaler.get_scale() == SCALE * 4  # the scale has grown twice
    assert scaled.optimizers[0].state[scaled.weight]["step"] == STEPS
    assert_same_bits(scaled.tensors(), plain.tensors())


def in_one_row(weight, bad):
    weight.grad._values()[1, 2] = bad


def in_a_repeated_row(weight, bad):
    """Repeat the first row in the gradient, so that it is not coalesced."""
    rows, values = weight.grad._indices(), weight.grad._values().clone()
    values[0, 1] = bad
    weight.grad = torch.sparse_coo_tensor(
        torch.cat([rows, rows[:, :1]], 1), torch.cat([values, torch.ones(1, DIM)]), weight.shape,
        check_invariants=True,
    )  # fmt: skip


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("poison", [in_one_row, in_a_repeated_row])
@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("at", [0, 4])
def test_a_step_with_a_bad_gradient_is_skipped(at, clipped, poison, bad):
    training = Training(torch.float32, max_norm=0.5 if clipped else None)
    plain = Training(torch.float32, max_norm=training.max_norm, enabled=False)
    for step, batch in enumerate(batches(torch.float32)):
        training.backward(*batch)
        plain.backward(*batch)  # also for the skipped batch, whose keys get rows
        if step != at:
            training.step()
            plain.step()
            continue
        poison(training.weight, bad)
        before, scale = training.tensors(), training.scaler.get_scale()
        training.step()
        assert_same_bits(training.tensors(), before)
        assert training.scaler.get_scale() == scale / 2
    # Training then continues as if the skipped step did not exist.
    assert training.optimizers[0].state[training.weight]["step"] == STEPS - 1
    assert_same_bits(training.tensors(), plain.tensors())


def test_only_the_optimizer_of_the_bad_gradient_skips():
    training = Training(torch.float32, two_optimizers)
    training.backward(*next(batches(torch.float32)))
    in_one_row(training.weight, math.inf)
    before, head = training.weight.detach().clone(), training.model[2].weight.detach().clone()
    training.step()
    assert same_bits(training.weight, before)
    assert not training.optimizers[0].state
    assert (training.model[2].weight != head).all()
    assert training.scaler.get_scale() == SCALE / 2
