"""Under exact Adam and SGD with momentum, every reader sees the weights that torch would give."""

import copy
import gc
import io
import math
import threading
import time
import weakref

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import optim
from sparsekit.optim import catch_up

from .cases import ALL_ROWS, TOLERANCE, TensorFlowAdam, make, start

pytestmark = pytest.mark.usefixtures("engine")

KEYS, DIM = 20, 5
DENSE = {
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
    "Adam sweep": (torch.optim.Adam, {"lr": 0.1}),
    "Adam eps of TensorFlow": (TensorFlowAdam, {"lr": 0.1, "eps": 1e-2}),
    "SGD catch_up": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov catch_up": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
}
DTYPES = [torch.float64, torch.float32]


def layer_of(dtype=torch.float64, **settings):
    """Return a layer with key k in row k and the same initial vectors on every call."""
    return sparsekit.All2AllDenseEmbedding(
        KEYS, DIM, 1, 1, dynamic_input=True, use_hashtable=False, dtype=dtype, seed=1,
        embedding_initializer=sparsekit.nn.Normal(), **settings,
    )  # fmt: skip


def keys_of(step):
    """Return a step's keys: 0 always, 1 in steps 0 and 45, others at random, but never 19."""
    generator = torch.Generator().manual_seed(step)
    keys = torch.randint(2, KEYS - 1, (3,), generator=generator)
    return torch.cat([keys, torch.tensor([0, 1] if step in (0, 45) else [0])])


def loss_of(vectors, step):
    """Return a loss whose gradient depends on the vectors, so that errors persist."""
    target = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(step))
    return ((vectors - target.to(vectors.dtype)) ** 2).sum()


class Twins:
    """A layer under our optimizer and a dense weight under torch's, trained on the same batches."""

    def __init__(self, name, dtype=torch.float64, **settings):
        self.layer = layer_of(dtype)
        self.dense = torch.nn.Parameter(self.layer.weight.detach().clone())
        self.ours = make(name, [self.layer.weight], **settings)
        kind, own = DENSE[name]
        self.theirs = kind([self.dense], **(own | settings))
        self.close = {"rtol": 0, "atol": TOLERANCE[dtype]}

    def step(self, step, keys=None):
        keys = keys_of(step) if keys is None else keys
        vectors, expected = self.layer(keys), self.dense[keys]
        torch.testing.assert_close(vectors, expected, **self.close)
        self.layer.weight.note_version()
        for optimizer in (self.ours, self.theirs):
            optimizer.zero_grad()
        loss_of(vectors, step).backward()
        loss_of(expected, step).backward()
        self.ours.step()
        self.theirs.step()
        assert not self.layer.weight.written()

    def steps(self, *bounds):
        """Train for the steps ``range(*bounds)``."""
        for step in range(*bounds):
            self.step(step)

    def check_all(self):
        """Compare the vectors of all keys, as read by a lookup."""
        self.layer.weight.note_version()
        with torch.no_grad():
            found = self.layer(torch.arange(KEYS))
        torch.testing.assert_close(found, self.dense.detach(), **self.close)
        # A step is not a manual write, after which a layer would check its free rows.
        assert not self.layer.weight.written()


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL_ROWS)
def test_equals_torchs_dense_optimizer(name, dtype):
    twins = Twins(name, dtype)
    twins.steps(50)
    twins.check_all()
    torch.testing.assert_close(twins.layer.weight, twins.dense, **twins.close)


@pytest.mark.parametrize("name", ALL_ROWS)
def test_reading_and_saving_between(name):
    twins = Twins(name)
    for step in range(40):
        twins.step(step)
        if step % 7 == 3:
            twins.layer.eval()
            twins.check_all()
            twins.layer.train()
        if step % 11 == 5:
            saved = torch.nn.ModuleDict({"embed": twins.layer}).state_dict()["embed.weight"]
            torch.testing.assert_close(saved, twins.dense.detach(), **twins.close)
        if step % 13 == 7:
            twins.ours.state_dict()
            torch.testing.assert_close(
                twins.layer.weight.detach(), twins.dense.detach(), **twins.close
            )


@pytest.mark.parametrize("name", ALL_ROWS)
def test_a_learning_rate_that_changes(name):
    twins = Twins(name)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0 if step < 3 else 1.5 / step)
        for optimizer in (twins.ours, twins.theirs)
    ]
    for step in range(40):
        twins.step(step)
        for scheduler in schedulers:
            scheduler.step()
    twins.check_all()


@pytest.mark.parametrize(
    ("name", "changed"), [("Adam", {"betas": (0.5, 0.9)}), ("SGD catch_up", {"momentum": 0.5})]
)
def test_settings_that_change(name, changed):
    twins = Twins(name)
    for step in range(30):
        if step == 15:
            for optimizer in (twins.ours, twins.theirs):
                optimizer.param_groups[0].update(changed)
        twins.step(step)
    twins.check_all()


@pytest.mark.parametrize("most", [1, 7])
@pytest.mark.parametrize("name", ["Adam", "SGD catch_up"])
def test_only_so_many_steps_are_kept(name, most, monkeypatch):
    monkeypatch.setattr(catch_up, "_MOST", most)
    twins = Twins(name)
    for step in range(30):
        twins.step(step)
        assert len(twins.ours._missed[twins.layer.weight].numbers) <= most
    twins.check_all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16], ids=str)
def test_both_modes_give_the_same_bits(dtype):
    # Rows miss so few steps that catching up performs all of them.
    layers = layer_of(dtype), layer_of(dtype)
    optimizers = [
        optim.Adam([layer.weight], lr=0.1, mode=mode)
        for layer, mode in zip(layers, ("catch_up", "sweep"), strict=True)
    ]
    for step in range(60):
        for layer, optimizer in zip(layers, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(layer(keys_of(step)), step).backward()
            optimizer.step()
    late = layers[0].weight.detach().clone()
    assert not same_bits(late, layers[1].weight)
    optimizers[0].catch_up(layers[0].weight)
    assert same_bits(*(layer.weight for layer in layers))


def test_a_step_touches_the_rows_of_its_batch_only():
    twins = Twins("Adam")
    twins.steps(10)
    before = twins.layer.weight.detach().clone()
    for optimizer in (twins.ours, twins.theirs):
        optimizer.param_groups[0]["lr"] = 0.2  # late rows keep the rate of each step
    twins.step(10, keys=torch.tensor([3, 5]))
    moved = (twins.layer.weight != before).any(1)
    assert moved.nonzero().squeeze(1).tolist() == [3, 5]
    twins.check_all()


def test_rows_without_gradients_so_far_do_not_move():
    layer = layer_of()
    before = layer.weight.detach().clone()
    optimizer = optim.Adam([layer.weight], lr=0.1, mode="sweep")
    for step in range(5):
        loss_of(layer(keys_of(step)), step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert same_bits(layer.weight[19], before[19])


@pytest.mark.pairs
@pytest.mark.parametrize("name", ALL_ROWS)
@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (), (0, 3)], ids=str)
def test_dense_parameters(name, shape):
    weight = torch.nn.Parameter(start(shape=shape).detach())
    other = torch.nn.Parameter(weight.detach().clone())
    kind, settings = DENSE[name]
    optimizers = make(name, [weight]), kind([other], **settings)
    for seed in range(1, 20):
        weight.grad, other.grad = (start(shape=shape, seed=seed).detach() for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
        torch.testing.assert_close(weight, other, rtol=0, atol=1e-12)
    assert not vars(weight)  # only layers let rows catch up


@pytest.mark.pairs
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "state_dict", "optimizer first"])
@pytest.mark.parametrize("name", ALL_ROWS)
def test_resumed_run_equals_an_uninterrupted_one(name, way):
    whole, first = Twins(name), Twins(name)
    for step in range(30):
        whole.step(step)
    for step in range(13):
        first.step(step)
    layer, optimizer = first.layer, first.ours
    if way == "deepcopy":
        second, resumed = copy.deepcopy((layer, optimizer))
    elif way == "pickle":
        file = io.BytesIO()
        torch.save((layer, optimizer), file)
        file.seek(0)
        second, resumed = torch.load(file, weights_only=False)
    else:
        second = layer_of()
        resumed = make(name, [second.weight], lr=7)
        states = [optimizer.state_dict(), layer.state_dict()]
        if way == "optimizer first":
            resumed.load_state_dict(states[0])
            second.load_state_dict(states[1])
        else:
            second.load_state_dict(states[1])
            resumed.load_state_dict(states[0])
    for step in range(13, 30):
        resumed.zero_grad()
        loss_of(second(keys_of(step)), step).backward()
        resumed.step()
    for one, other in ((second, resumed), (whole.layer, whole.ours)):
        assert same_bits(one(torch.arange(KEYS)), whole.layer(torch.arange(KEYS)))
        state, expected = other.state[one.weight], whole.ours.state[whole.layer.weight]
        assert all(same_bits(state[k], expected[k]) for k in expected if k != "step")
        assert state["step"] == 30


def test_loading_a_layer_drops_what_its_rows_had_missed():
    twins = Twins("Adam")
    saved = {k: v.clone() for k, v in twins.layer.state_dict().items()}
    twins.steps(10)
    twins.layer.load_state_dict(saved)
    assert same_bits(twins.layer(torch.arange(KEYS)), saved["weight"])


def test_nothing_to_catch_up_with():
    weight = start()
    optimizer = make("Adam", [weight])
    optimizer.catch_up(weight)
    optimizer.catch_up(weight, torch.tensor([1]))
    assert same_bits(weight, start())


def test_a_layer_that_is_converted():
    twins = Twins("Adam", torch.float32)
    twins.steps(10)
    twins.layer.double()
    torch.testing.assert_close(twins.layer.weight.detach().float(), twins.dense, **twins.close)
    twins.dense = torch.nn.Parameter(twins.dense.detach().double())
    states = [twins.ours.state_dict(), twins.theirs.state_dict()]
    twins.ours = optim.Adam([twins.layer.weight], lr=0.1)
    twins.theirs = torch.optim.Adam([twins.dense], lr=0.1)
    for optimizer, state in zip((twins.ours, twins.theirs), states, strict=True):
        optimizer.load_state_dict(state)
    twins.close = {"rtol": 0, "atol": 1e-5}  # tolerance for the steps in float32
    twins.steps(10, 20)
    twins.check_all()


def test_torch_compile():
    twins = Twins("Adam")
    twins.steps(10)
    with torch.no_grad():
        found = torch.compile(twins.layer, backend="eager")(torch.arange(KEYS))
    torch.testing.assert_close(found, twins.dense.detach(), **twins.close)


def test_new_keys_do_not_make_up_for_what_their_rows_did_before():
    # A penalty on the whole weight moves rows that have no key yet.
    results = []
    for mode in ("catch_up", "sweep"):
        layer = sparsekit.All2AllDenseEmbedding(
            20, 3, 1, 1, dynamic_input=True, dtype=torch.float64, name="new keys"
        )
        optimizer = optim.Adam([layer.weight], lr=0.1, mode=mode)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
        for _ in range(5):
            optimizer.zero_grad()
            layer(torch.tensor([1, 2])).sum().backward()
            optimizer.step()
        results.append(layer(torch.tensor([7, 1])).detach())
    assert same_bits(*results)


def test_momentum_that_a_schedule_changes():
    twins = Twins("SGD catch_up", lr=0.01)
    # The schedule turns momentum on.
    twins.ours = optim.SGD([twins.layer.weight], lr=0.01, mode="catch_up")
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=45)
        for optimizer in (twins.ours, twins.theirs)
    ]
    for step in range(40):
        twins.step(step)
        for scheduler in schedulers:
            scheduler.step()
    twins.check_all()


def test_momentum_that_is_turned_off_and_on():
    twins = Twins("SGD catch_up")
    twins.steps(10)
    for optimizer in (twins.ours, twins.theirs):
        optimizer.param_groups[0]["momentum"] = 0.0
    twins.steps(10, 20)
    assert twins.layer.weight.before_read is None
    for optimizer in (twins.ours, twins.theirs):
        optimizer.param_groups[0]["momentum"] = 0.9
    twins.steps(20, 30)
    twins.check_all()


def test_two_optimizers_in_turns():
    layers = layer_of(), layer_of()
    optimizers = [
        [optim.Adam([layer.weight], lr=rate, mode=mode) for rate in (0.1, 0.01)]
        for layer, mode in zip(layers, ("catch_up", "sweep"), strict=True)
    ]
    for step in range(30):
        for layer, pair in zip(layers, optimizers, strict=True):
            optimizer = pair[step % 2]
            optimizer.zero_grad()
            loss_of(layer(keys_of(step)), step).backward()
            optimizer.step()
            pair[step % 2 - 1].state_dict()  # the rows of the other layer stay late
    found = [layer(torch.arange(KEYS)) for layer in layers]
    assert same_bits(*found)


def test_an_optimizer_lives_only_as_long_as_rows_are_late():
    twins = Twins("Adam")
    twins.steps(5)
    alive = weakref.ref(twins.ours)
    twins.ours = optim.LazyAdam([twins.layer.weight])
    gc.collect()
    # The old optimizer must stay alive: it holds the steps that the rows have missed.
    assert alive() is not None
    loss_of(twins.layer(torch.tensor([3])), 5).backward()
    twins.ours.step()
    gc.collect()
    assert alive() is None


def test_other_tensors_in_place_of_the_weight():
    twins = Twins("Adam")
    twins.steps(5)
    keys = torch.arange(KEYS)
    other = torch.ones(KEYS, DIM, dtype=torch.float64)
    out = torch.func.functional_call(twins.layer, {"weight": other}, (keys,))
    assert torch.equal(out, other)
    twins.check_all()
    twins.layer.weight = torch.nn.Parameter(other)
    assert torch.equal(twins.layer(keys), other)
    assert torch.equal(twins.layer.state_dict()["weight"], other)


def test_another_optimizer_takes_over():
    twins = Twins("Adam")
    twins.steps(10)
    twins.ours = make("SGD catch_up", [twins.layer.weight])
    twins.theirs = torch.optim.SGD([twins.dense], lr=0.1, momentum=0.9)
    twins.steps(10, 20)
    twins.check_all()


def test_a_state_of_torchs_adam_can_be_resumed():
    twins = Twins("Adam")
    twins.steps(8)
    twins.layer.load_state_dict(twins.layer.state_dict() | {"weight": twins.dense.detach()})
    resumed = optim.Adam([twins.layer.weight])
    resumed.load_state_dict(twins.theirs.state_dict())
    twins.ours = resumed
    twins.steps(8, 30)
    twins.check_all()


def test_steps_of_a_hash_table():
    layer = sparsekit.DistributedEmbedding("mean", 30, 4, 1, 3, dtype=torch.float64, name="hashed")
    other = sparsekit.DistributedEmbedding("mean", 30, 4, 1, 3, dtype=torch.float64, name="hashed")
    optimizers = [
        optim.Adam([layer.weight], lr=0.1),
        optim.Adam([other.weight], lr=0.1, mode="sweep"),
    ]
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        keys = torch.randint(-10, 10, (3, 1, 3), generator=generator) * 10**15
        outputs = layer(keys), other(keys)
        assert same_bits(*outputs)
        for output, optimizer in zip(outputs, optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(output, step).backward()
            optimizer.step()
    for model in (layer, other):
        model.eval()
    # Some of these keys are unseen.
    keys = torch.arange(-12, 12).view(-1, 1, 1).expand(-1, 1, 3) * 10**15
    assert same_bits(layer(keys), other(keys))


def test_evaluation_by_several_threads(monkeypatch):
    twins = Twins("Adam")
    twins.steps(30)
    twins.layer.eval()
    found, barrier = [None] * 4, threading.Barrier(4)
    op, inside, most = catch_up.ops.catch_up_rows_, [], []

    def slowly(*arguments):
        inside.append(arguments)
        most.append(len(inside))
        time.sleep(0.2)  # another thread might get in between
        op(*arguments)
        inside.pop()

    monkeypatch.setattr(catch_up.ops, "catch_up_rows_", slowly)

    def look_up(i):
        barrier.wait()
        with torch.no_grad():
            found[i] = twins.layer(torch.arange(KEYS))

    threads = [threading.Thread(target=look_up, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    for vectors in found:
        torch.testing.assert_close(vectors, twins.dense.detach(), **twins.close)


def test_sparse_gradients_of_a_parameter_that_nobody_watches():
    for name in ("Adam", "SGD catch_up"):
        weight = torch.nn.Parameter(torch.zeros(4, 2))
        weight.grad = torch.zeros(4, 2).to_sparse(1)
        optimizer = make(name, [weight])
        message = rf"^{type(optimizer).__name__}: mode='catch_up' .* shape \(4, 2\) is another's"
        with pytest.raises(ValueError, match=message):
            optimizer.step()
    weight.grad = torch.ones(4, 2).to_sparse(1)
    optim.Adam([weight], mode="sweep").step()
    assert (weight != 0).all()
    plain = optim.SGD([weight], mode="catch_up")  # without momentum, no row is ever late
    plain.step()
    assert plain.state[weight].keys() == {"step"}


BAD = [
    (optim.Adam, {"mode": "lazy"}, "Adam: mode must be 'catch_up' or 'sweep', got 'lazy'"),
    (optim.Adam, {"betas": (0.9, 1)}, r"Adam: betas must be .* got \(0.9, 1\)"),
    (optim.SGD, {"mode": "sweep"}, "SGD: mode must be 'touched' or 'catch_up', got 'sweep'"),
    (optim.SGD, {"nesterov": True}, "SGD: nesterov needs momentum > 0"),
    (optim.SGD, {"momentum": 1.0}, r"SGD: momentum must be in \[0, 1\), got 1.0"),
    (optim.SGD, {"mode": "catch_up", "weight_decay": 0.1}, "SGD: weight_decay does not go with"),
    (optim.SGD, {"weight_decay": -1}, "SGD: weight_decay must be >= 0, got -1"),
    (optim.LazyAdam, {"bias_correction": "row"}, "must be 'global' or 'per_row', got 'row'"),
    (optim.Adagrad, {"lr_decay": -1}, "Adagrad: lr_decay must be >= 0, got -1"),
    (optim.RowWiseAdagrad, {"eps": -1}, "RowWiseAdagrad: eps must be >= 0, got -1"),
    (optim.RMSProp, {"form": "keras"}, "form must be 'torch' or 'tensorflow', got 'keras'"),
    (optim.RMSProp, {"alpha": 1}, r"RMSProp: alpha must be in \[0, 1\), got 1"),
    (optim.Ftrl, {"lr": -1}, "Ftrl: lr must be >= 0, got -1"),
    (optim.Ftrl, {"lr_power": 0.5}, "Ftrl: lr_power must be <= 0, got 0.5"),
    (optim.Ftrl, {"lr_power": math.nan}, "Ftrl: lr_power must be <= 0, got nan"),
    (optim.Ftrl, {"l1": -1}, "Ftrl: l1 must be >= 0, got -1"),
]


@pytest.mark.parametrize(("kind", "settings", "message"), BAD)
def test_bad_arguments(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind([start()], **settings)


@pytest.mark.parametrize("value", [None, "x", True, torch.ones(2)])
def test_settings_that_are_no_numbers(value):
    for kind, name in ((optim.Ftrl, "lr_power"), (optim.Ftrl, "l1"), (optim.LazyAdam, "lr")):
        with pytest.raises(TypeError, match=f"{kind.__name__}: {name} must be a number, got"):
            kind([start()], **{name: value})
