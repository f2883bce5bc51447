"""Kernels read a learning rate that is a tensor, and the optimizer keeps that same tensor."""

import copy
import io

import pytest
import torch
from conftest import same_bits
from host_waits import waits_of
from ops.optimizer_rules import CASES, PER_ROW, distinct_rows, random, table_of
from simt_counts import counted

import sparsekit
from sparsekit import checkpoint, ops, optim
from sparsekit.optim import fuse_in_backward
from sparsekit.train import JsonLines, Trainer, linear_warmup
from sparsekit.train.plots import read_run

from .cases import ALL_ROWS, OPTIMIZERS, TOUCHED, gradients, make, run, start

RATES = (torch.float32, torch.float64)


def rate(value=0.1, dtype=torch.float32):
    return torch.tensor(value, dtype=dtype)


def layer_of(name="lr", rows=50):
    return sparsekit.DistributedEmbedding("sum", rows, 4, 2, 3, seed=1, name=name)


def keys(seed=0):
    return torch.randint(0, 40, (6, 2, 3), generator=torch.Generator().manual_seed(seed))


@pytest.mark.pairs
@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("rate_dtype", RATES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_fills_the_tensor_and_steps_follow(name, dtype, rate_dtype):
    """The weights have the same bits as with a learning rate that is a number."""
    lr = rate(0.3, rate_dtype)
    weight, other = start(dtype), start(dtype)
    ours, expected = make(name, [weight], lr=lr), make(name, [other])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(ours, gamma=0.5)
    for grad in gradients(dtype, steps=6):
        expected.param_groups[0]["lr"] = lr.item()
        run(ours, weight, [grad])
        run(expected, other, [grad])
        scheduler.step()
        assert ours.param_groups[0]["lr"] is lr
    assert lr.item() == pytest.approx(0.3 * 0.5**6)
    for optimizer in (ours, expected):
        optimizer.state_dict()  # late rows catch up
    assert same_bits(weight, other)
    for state, value in ours.state[weight].items():
        assert same_bits(value, expected.state[other][state]), state


@pytest.mark.pairs(any_device=True)
@pytest.mark.parametrize("rate_dtype", RATES, ids=str)
@pytest.mark.parametrize(
    ("case", "per_row"),
    [(c, p) for c, (rule, _, _) in CASES.items() for p in (False, True)[: 1 + (rule in PER_ROW)]],
)
def test_the_op_reads_the_tensor(device, case, per_row, rate_dtype):
    rule, settings, _ = CASES[case]
    lr = rate(0.3, rate_dtype).to(device)
    rows, grad = distinct_rows(5, 9).to(device), random((5, 6), torch.float32, 7).to(device)
    results = []
    for given, first in ((lr, float("nan")), (None, lr.item())):
        weight, states = table_of(case, 9, 6, torch.float32)
        weight, states = weight.to(device), [state.to(device) for state in states]
        row_step = torch.ones(9, dtype=torch.int32, device=device)
        ops.update_rows_(
            weight, states, row_step, rows, grad, torch.tensor(3, device=device), rule,
            [first, *settings[1:]], per_row=per_row, lr=given,
        )  # fmt: skip
        results.append([weight, *states])
    assert all(map(same_bits, *results))


@pytest.mark.parametrize(
    ("lr", "message"),
    [
        (torch.tensor(1), "update_rows_: lr must be float32 or float64, got Long"),
        (torch.tensor([0.1, 0.2]), "update_rows_: lr must have one element, got 2"),
        (torch.tensor([]), "update_rows_: lr must have one element, got 0"),
        ("weight", "update_rows_: weight overlaps lr in memory"),
        (torch.tensor(0.1, device="meta"), "all tensors must be on one device.* lr on meta"),
    ],
)
def test_tensors_that_the_op_refuses(device, lr, message):
    weight, step = torch.ones(3, 2, device=device), torch.ones((), dtype=torch.int64, device=device)
    lr = weight[0, 0] if isinstance(lr, str) else lr if lr.is_meta else lr.to(device)
    with pytest.raises(ValueError, match=message):
        ops.update_rows_(weight, [], None, None, weight.clone(), step, "sgd", [0, 0, 0, 0], lr=lr)
    assert (weight == 1).all()


@pytest.mark.parametrize(
    ("lr", "error", "message"),
    [
        (torch.tensor(1), TypeError, "lr must be a number, or a float32 or float64 tensor, got"),
        (torch.tensor(0.1, dtype=torch.bfloat16), TypeError, "tensor, got one of torch.bfloat16"),
        (torch.tensor([0.1, 0.2]), TypeError, "lr must be a number, got tensor"),
        (torch.tensor(-0.1), ValueError, "lr must be >= 0, got -0.1"),
        (torch.tensor(float("nan")), ValueError, "lr must be >= 0, got nan"),
    ],
)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tensors_that_optimizers_refuse(name, lr, error, message):
    with pytest.raises(error, match=message):
        make(name, [start()], lr=lr)


@pytest.mark.parametrize("fused", [False, True])
def test_a_tensor_on_another_device_is_refused_before_anything_changes(fused):
    """The step raises without reading the value, even a negative one, since a read would wait."""
    layer, other = layer_of(), start()
    lr = torch.tensor(-0.1, device="meta")  # stands for another GPU
    groups = [{"params": [other], "lr": 0.1}, {"params": layer.parameters()}]
    optimizer = optim.LazyAdam(groups, lr=lr)
    if fused:
        fuse_in_backward(optimizer, layer)
    before, known = other.detach().clone(), layer(keys()).detach()
    other.grad = torch.ones_like(other)

    def step():
        layer(keys()).sum().backward()
        optimizer.step()

    with pytest.raises(
        ValueError, match=r"^LazyAdam: lr is on meta, but its parameters are on cpu"
    ):
        step()
    assert torch.equal(other, before)
    assert torch.equal(layer.eval()(keys()), known)


@pytest.mark.parametrize("name", [*OPTIMIZERS])
@pytest.mark.parametrize("fused", [False, True])
def test_steps_wait_as_often_and_launch_as_much_as_with_a_number(name, fused):
    def measured(lr):
        layer, batch = layer_of(rows=1000), keys()
        optimizer = make(name, layer.parameters(), lr=lr)
        if fused:
            fuse_in_backward(optimizer, layer)

        def step():
            layer(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        waits = waits_of(step, layer, batch, lr if isinstance(lr, torch.Tensor) else [])
        step()
        with counted() as counts:
            step()
        return waits, counts.sum()

    (waits, found), (expected_waits, expected) = measured(rate()), measured(0.1)
    assert waits == expected_waits
    if fused and name in TOUCHED and "maximize" not in TOUCHED[name][1]:
        assert waits.total() == 0
    # torch's kernels compute the step size of late rows.
    more = (3 if name.startswith("Adam") else 1) if name in ALL_ROWS else 0
    assert found.launches == expected.launches + more
    assert found.kernels == expected.kernels


def test_a_number_is_not_made_a_tensor():
    """A learning rate that is a number is passed as a number; a tensor is passed as a tensor."""
    layer, batch = layer_of(), keys()
    optimizer = optim.LazyAdam(layer.parameters(), lr=0.1)
    fuse_in_backward(optimizer, layer)
    seen = []
    weight = layer.weight
    original = optimizer._step

    def step_of(*args):
        seen.append(original(*args))
        return seen[-1]

    optimizer._step = step_of
    layer(batch).sum().backward()
    assert [(each["lr"], each["settings"][0]) for each in seen] == [(None, 0.1)]
    optimizer.step()
    optimizer.param_groups[0]["lr"] = rate()
    layer(batch).sum().backward()
    assert seen[-1]["lr"] is optimizer.param_groups[0]["lr"]
    assert weight.grad is None


def trained(optimizer, weight, count=2):
    run(optimizer, weight, gradients(steps=count))
    return optimizer


@pytest.mark.pairs
@pytest.mark.parametrize("saved", [0.25, rate(0.25), rate(0.25, torch.float64)])
@pytest.mark.parametrize("own", [0.5, rate(0.5), rate(0.5, torch.float64)])
@pytest.mark.parametrize("way", ["state_dict", "file", "checkpoint"])
def test_a_loaded_rate_stays_a_tensor_or_a_number(tmp_path, way, saved, own):
    saved, own = copy.deepcopy(saved), copy.deepcopy(own)
    weight = start()
    module, other = (torch.nn.ParameterDict({"w": p}) for p in (weight, start()))
    first = trained(optim.LazyAdam([weight], lr=saved), weight)
    second = optim.LazyAdam(other.parameters(), lr=own)
    if way == "checkpoint":
        checkpoint.load(other, checkpoint.save(module, tmp_path / "saved", first), second)
    else:
        state = first.state_dict()
        if way == "file":
            torch.save(state, tmp_path / "state.pt")
            state = torch.load(tmp_path / "state.pt", weights_only=True)
        second.load_state_dict(state)
    lr = second.param_groups[0]["lr"]
    assert lr is own if isinstance(own, torch.Tensor) else type(lr) is float
    assert float(lr) == 0.25
    assert second.state[other["w"]]["step"] == 2
    first.param_groups[0]["lr"] = 0.75
    assert float(lr) == 0.25


def test_a_refused_state_leaves_the_tensor_as_it_was():
    weight, lr = start(), rate(0.5)
    optimizer = optim.LazyAdam([weight], lr=lr)
    state = trained(optim.LazyAdam([start()], lr=0.25), weight).state_dict()
    for bad in (-1.0, rate(-1.0), rate(0.5).bfloat16()):
        state["param_groups"][0]["lr"] = bad
        with pytest.raises((ValueError, TypeError), match=r"LazyAdam: lr must be"):
            optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr == 0.5


def test_a_copy_has_its_own_tensor():
    weight, lr = start(), rate(0.5)
    optimizer = trained(optim.LazyAdam([weight], lr=lr), weight)
    copied = copy.deepcopy(optimizer)
    lr.fill_(0.125)
    (group,) = copied.param_groups
    assert group["lr"] == 0.5
    assert group["lr"].dtype == torch.float32


def test_late_rows_catch_up_with_the_rates_of_the_steps_that_they_missed():
    """The optimizer keeps the values of past steps, since the tensor changes in place."""
    lr, weight, other = rate(0.5), start(), start()
    late = optim.Adam([weight], lr=lr)
    swept = optim.Adam([other], lr=0.5, mode="sweep")
    for step, grad in enumerate(gradients(steps=8)):
        lr.fill_(0.5 / (step + 1))
        swept.param_groups[0]["lr"] = lr.item()
        run(late, weight, [grad])
        run(swept, other, [grad])
    lr.fill_(float("nan"))
    late.catch_up(weight)
    assert same_bits(weight, other)


def test_clipping_and_a_warm_up_in_a_trainer(tmp_path):
    def trained(lr):
        model = layer_of(name="in a trainer")
        optimizer = optim.LazyAdam(model.parameters(), lr=lr)
        logs = tmp_path / str(isinstance(lr, float)) / "metrics.jsonl"

        def losses(model, batch):
            return model(batch[0]).sum((1, 2)), 0.0

        Trainer(
            model, losses, [optimizer], schedulers=[linear_warmup(optimizer, 4, 5)],
            clip_norm=1.0, stream=io.StringIO(), logs=[JsonLines(logs)], log_every=1,
            checkpoints=checkpoint.Checkpoints(logs.parent / "saved"),
        ).fit([(keys(i),) for i in range(6)], epochs=1)  # fmt: skip
        return model, [r["lr"] for r in read_run(logs.parent) if r["kind"] == "step"]

    lr = rate(0.1, torch.float64)
    (model, rates), (expected, expected_rates) = trained(lr), trained(0.1)
    assert same_bits(model.weight, expected.weight)
    assert rates == expected_rates
    assert lr.item() == pytest.approx(0.4)
