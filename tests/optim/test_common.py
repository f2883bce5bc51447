"""Tests of behaviour that all optimizers share."""

import copy
import inspect
import io
import re

import pytest
import torch
from conftest import generator, same_bits
from reference import ops as reference

import sparsekit
from sparsekit.optim import LazyAdam, RowOptimizer

from .cases import DIM, OPTIMIZERS, ROWS, TOUCHED, gradients, make, run, sparse, start

pytestmark = pytest.mark.usefixtures("engine")

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def caught_up(optimizer, weight):
    """Return the weight after late rows have caught up, as a reader sees it."""
    optimizer.state_dict()
    return weight.detach()


def test_every_optimizer_is_here():
    exported = {value for value in vars(sparsekit.optim).values() if isinstance(value, type)}
    ours = {kind for kind in exported if issubclass(kind, RowOptimizer)} - {RowOptimizer}
    assert ours == {kind for kind, _ in OPTIMIZERS.values()}


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in OPTIMIZERS.values()))
def test_settings_are_the_arguments_and_have_ranges(kind):
    parameters = dict(inspect.signature(kind).parameters)
    del parameters["params"]
    optimizer = kind([start()])
    assert parameters.keys() <= optimizer.defaults.keys()
    for name, parameter in parameters.items():
        assert optimizer.defaults[name] == parameter.default
        if not isinstance(parameter.default, bool) and name != "seed":
            with pytest.raises((TypeError, ValueError), match=f"{kind.__name__}: {name} must be"):
                kind([start()], **{name: "no such value"})


# The documented defaults; another default would change how existing models train.
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
OF_ADAGRAD = {"lr": 1e-2, "lr_decay": 0, "initial_accumulator_value": 0, "eps": 1e-10}
DEFAULTS = {
    "SGD": {"lr": 1e-3, "momentum": 0, "nesterov": False, "mode": "touched"},
    "LazyAdam": {**ADAM, "amsgrad": False, "eps_convention": "tensorflow"},
    "Adam": {**ADAM, "mode": "catch_up", "eps_convention": "torch"},
    "Adagrad": OF_ADAGRAD,
    "RowWiseAdagrad": OF_ADAGRAD,
    "RMSProp": {"lr": 1e-2, "alpha": None, "eps": None, "momentum": 0, "form": "torch"},
    "Ftrl": {"lr": 1e-3, "lr_power": -0.5, "initial_accumulator_value": 0.1, "l1": 0, "l2": 0},
    "PartialRowWiseAdam": ADAM,
    "LazyLAMB": ADAM,
}
OF_SEVERAL = {
    "weight_decay": 0, "decoupled_weight_decay": False, "bias_correction": "global",
    "stochastic_rounding": False, "seed": 0, "maximize": False,
}  # fmt: skip


@pytest.mark.parametrize("kind", dict.fromkeys(kind for kind, _ in OPTIMIZERS.values()))
def test_defaults(kind):
    found = {name: each.default for name, each in inspect.signature(kind).parameters.items()}
    own = DEFAULTS[kind.__name__]
    assert {name: found[name] for name in own} == own
    rest = found.keys() - own.keys() - {"params", "initial_accumulator_value"}
    assert {name: found[name] for name in rest} == {name: OF_SEVERAL[name] for name in rest}


# The names of states, with which checkpoints are read; each costs as much memory as the weights.
ADAMS = "exp_avg exp_avg_sq"
STATES = {
    "SGD": "", "SGD momentum": "momentum_buffer", "SGD catch_up": "momentum_buffer row_step",
    "LazyAdam": ADAMS, "LazyAdam decay": f"{ADAMS} max_exp_avg_sq",
    "LazyAdam per row": f"{ADAMS} row_step", "Adam": f"{ADAMS} row_step",
    "Adam sweep": f"{ADAMS} row_step", "Adagrad": "sum", "RowWiseAdagrad": "sum",
    "RMSProp": "square_avg momentum_buffer", "RMSProp L2": "square_avg",
    "Ftrl": "accumulator linear", "PartialRowWiseAdam": ADAMS, "LazyLAMB": f"{ADAMS} row_step",
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_are_those_that_the_settings_need(name):
    weight = start()
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(steps=1))
    assert optimizer.state[weight].keys() == {"step", *STATES[name].split()}


@pytest.mark.parametrize("name", TOUCHED)
def test_steps_are_those_of_the_reference(name):
    weight, expected = start(), start().detach()
    optimizer = make(name, [weight])
    group = optimizer.param_groups[0]
    settings = [group["lr"], *optimizer._settings(group)]
    states = {
        state: expected.new_full((ROWS,) if state in optimizer.row_states else (ROWS, DIM), value)
        for state, value in optimizer._initial_states(group).items()
    }
    per_row = optimizer._per_row(group)
    row_step = torch.zeros(ROWS, dtype=torch.int32) if per_row else None
    for step, grad in enumerate(gradients(), 1):
        run(optimizer, weight, [grad])
        grad = grad.coalesce()
        reference.update_rows_(
            expected, list(states.values()), row_step, grad.indices()[0],
            -grad.values() if group["maximize"] else grad.values(), torch.tensor(step),
            optimizer.rule, settings, per_row=per_row,
        )  # fmt: skip
    torch.testing.assert_close(weight.detach(), expected)
    for state, values in states.items():
        torch.testing.assert_close(optimizer.state[weight][state], values)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_repeated_rows_are_added_up_first(name, dtype):
    # Use small whole numbers, whose sums are exact in any order.
    results = []
    for coalesced in (False, True):
        weight = start(dtype)
        optimizer = make(name, [weight])
        for step in range(5):
            rows = torch.randint(0, ROWS, (30,), generator=generator(step))
            values = torch.randint(-4, 5, (30, DIM), generator=generator(step)).to(dtype)
            grad = sparse(rows, values)
            weight.grad = grad.coalesce() if coalesced else grad
            assert weight.grad.is_coalesced() == coalesced
            optimizer.step()
        results.append(caught_up(optimizer, weight))
    assert same_bits(*results)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", ["state_dict", "file", "deepcopy"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resumed_run_equals_an_uninterrupted_one(name, dtype, way):
    grads = list(gradients(dtype, 10))
    whole = start(dtype)
    uninterrupted = make(name, [whole])
    run(uninterrupted, whole, grads)

    first = start(dtype)
    optimizer = make(name, [first])
    run(optimizer, first, grads[:5])
    if way == "deepcopy":
        second, resumed = copy.deepcopy((first, optimizer))
    else:
        state = optimizer.state_dict()
        second = copy.deepcopy(first)
        resumed = make(name, [second], lr=7)
        if way == "file":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        resumed.load_state_dict(state)
    run(resumed, second, grads[5:])
    assert same_bits(caught_up(resumed, second), caught_up(uninterrupted, whole))
    states = resumed.state[second], uninterrupted.state[whole]
    assert states[0].keys() == states[1].keys()
    assert all(same_bits(one, states[1][key]) for key, one in states[0].items() if one.dim())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_was_loaded_stays_as_it_is(name):
    weight, other = start(), start()
    optimizer, resumed = make(name, [weight]), make(name, [other])
    run(optimizer, weight, gradients(steps=2))
    state = optimizer.state_dict()
    before = copy.deepcopy(state["state"][0])
    resumed.load_state_dict(state)
    run(resumed, other, gradients(steps=3))
    caught_up(resumed, other)
    for key, value in before.items():
        assert same_bits(state["state"][0][key], value), key


@pytest.mark.pairs
@pytest.mark.parametrize("saved", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loaded", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_another_dtype_can_be_loaded(name, saved, loaded):
    weight = start(saved)
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(saved, 3))
    other = start(loaded)
    resumed = make(name, [other])
    resumed.load_state_dict(optimizer.state_dict())
    run(resumed, other, gradients(loaded, 2))
    assert resumed.state[other]["step"] == 5
    wide = torch.float64 if loaded == torch.float64 else torch.float32
    for key, value in resumed.state[other].items():
        assert value.dtype == {"step": torch.int64, "row_step": torch.int32}.get(key, wide)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_that_does_not_fit(name):
    weight = start()
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(steps=1))
    state = optimizer.state_dict()
    (own,) = state["state"].values()
    key = next((k for k in own if k not in ("step", "row_step")), None)
    if key is None:
        return  # plain SGD has no state
    whole = own[key]
    for damage, message in (
        (lambda: own.update({key: whole[None]}), rf"{key} must have shape .* got \(1, 12"),
        (lambda: own.update({key: whole[:-1]}), rf"{key} must have shape \(12,.* got \(11,"),
        (lambda: own.pop(key), f"has no {key}, but {', '.join(n for n in own if n != key)}, for"),
    ):
        damage()
        with pytest.raises(ValueError, match=f"^{type(optimizer).__name__}: .*{message}"):
            make(name, [start()]).load_state_dict(state)


def test_a_copy_from_before_a_setting_existed_gets_its_default():
    state = LazyAdam([start()], amsgrad=True).__getstate__()
    del state["param_groups"][0]["maximize"]
    copied = LazyAdam.__new__(LazyAdam)
    copied.__setstate__(state)
    assert copied.param_groups[0]["maximize"] is False
    assert copied.param_groups[0]["amsgrad"] is True


def test_a_state_that_counts_no_steps():
    optimizer = make("LazyAdam", [start()])
    run(optimizer, optimizer.param_groups[0]["params"][0], gradients(steps=1))
    state = optimizer.state_dict()
    del state["state"][0]["step"]
    message = r"LazyAdam: .* has no step, but exp_avg, exp_avg_sq, for parameter 0 of shape"
    with pytest.raises(ValueError, match=message):
        make("LazyAdam", [start()]).load_state_dict(state)


SHAPES = [(), (7,), (3, 4), (2, 3, 4), (0,), (0, 4), (3, 0)]


# Optimizers for which a row's shape matters have separate tests.
@pytest.mark.pairs
@pytest.mark.parametrize(
    ("name", "shape"),
    [(n, s) for n in TOUCHED for s in SHAPES if len(s) == 2 or not ("RowWise" in n or "LAMB" in n)],
    ids=str,
)
def test_dense_gradients_of_any_shape(name, shape):
    weight, flat = start(shape=shape), start(shape=shape)
    flat = torch.nn.Parameter(flat.detach().reshape(-1, 4 if len(shape) == 2 else 1))
    if shape == (3, 0):
        flat = torch.nn.Parameter(torch.empty(3, 0, dtype=torch.float64))
    optimizers = make(name, [weight]), make(name, [flat])
    for seed in range(1, 6):
        weight.grad = start(shape=shape, seed=seed).detach()
        flat.grad = weight.grad.reshape(flat.shape)
        for optimizer in optimizers:
            optimizer.step()
    assert weight.shape == shape
    assert same_bits(weight.detach().reshape(flat.shape), flat.detach())
    assert not vars(flat)  # only the weights of layers have attributes


def test_a_state_that_does_not_fit_changes_nothing():
    weights = [start(), start()]
    optimizer = make("LazyAdam", weights)
    for weight in weights:
        weight.grad = next(gradients())
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"] + 1
    state["state"][1]["exp_avg"] = torch.zeros(3, 3)
    with pytest.raises(ValueError, match=r"exp_avg must have shape \(12, 5\), got \(3, 3\)"):
        optimizer.load_state_dict(state)
    state["state"], state["param_groups"][0]["lr"] = before["state"], -1
    with pytest.raises(ValueError, match="LazyAdam: lr must be >= 0, got -1"):
        optimizer.load_state_dict(state)
    for index, weight in enumerate(weights):
        assert same_bits(optimizer.state[weight]["exp_avg"], before["state"][index]["exp_avg"])


@pytest.mark.pairs
@pytest.mark.parametrize("damage", [[-1, 2] * 6, [9, 0] * 6, [2**31 - 1] * ROWS, [1], [[1]] * ROWS])
@pytest.mark.parametrize("name", ["Adam", "LazyAdam per row", "LazyLAMB"])
def test_steps_of_rows_that_cannot_be(name, damage):
    weight = start()
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(steps=3))
    state = optimizer.state_dict()
    state["state"][0]["row_step"] = torch.tensor(damage, dtype=torch.int32)
    range_ = re.escape(f"be in [0, 3], the step, got numbers from {min(damage)} to {max(damage)}")
    message = rf"^{type(optimizer).__name__}: row_step must ({range_}|have shape \(12,\))"
    with pytest.raises(ValueError, match=message):
        make(name, [start()]).load_state_dict(state)


@pytest.mark.parametrize(
    ("ours", "theirs", "settings"),
    [
        ("Adam", "Adam", {"weight_decay": 0.1}),
        ("Adam", "Adam", {"amsgrad": True}),
        ("RMSProp", "RMSprop", {"centered": True, "momentum": 0.5}),
        ("SGD momentum", "SGD", {"dampening": 0.5, "momentum": 0.5}),
        ("Ftrl", "SGD", {"nesterov": True, "momentum": 0.5}),
    ],
)
def test_settings_of_torchs_that_are_not_ours(ours, theirs, settings):
    weight = torch.nn.Parameter(start().detach())
    optimizer = getattr(torch.optim, theirs)([weight], **settings)
    run(optimizer, weight, [torch.ones_like(weight)])
    ours, (name, value) = make(ours, [start()]), next(iter(settings.items()))
    message = (
        f"^{type(ours).__name__}: the state to load has {name}={value}, which there is not here$"
    )
    with pytest.raises(ValueError, match=message):
        ours.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", ["SGD momentum", "SGD catch_up"])
def test_a_run_of_torchs_sgd_can_be_resumed(name):
    weight, other = (torch.nn.Parameter(start().detach()) for _ in range(2))
    theirs = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    first = torch.optim.SGD([other], lr=0.1, momentum=0.9)
    grads = [start(seed=seed).detach() for seed in range(8)]
    run(theirs, weight, grads)
    run(first, other, grads[:4])
    ours = make(name, [other])
    ours.load_state_dict(first.state_dict())
    run(ours, other, grads[4:])
    torch.testing.assert_close(other, weight, rtol=0, atol=1e-12)
    assert "keys" not in ours.state_dict()["state"][0]  # only tables have keys


def test_weight_decay_of_torchs_adam_is_another():
    weight = torch.nn.Parameter(start().detach())
    weight.grad = torch.ones_like(weight)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        theirs = kind([weight], weight_decay=0.5)
        theirs.step()
        ours = make("LazyAdam", [start()])
        if kind is torch.optim.AdamW:
            ours.load_state_dict(theirs.state_dict())
            assert ours.param_groups[0]["weight_decay"] == 0.5
        else:
            message = r"^LazyAdam: .* weight_decay of 0\.5 that is part of the gradient"
            with pytest.raises(ValueError, match=message):
                ours.load_state_dict(theirs.state_dict())


@pytest.mark.pairs
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("name", ["SGD momentum", "Adagrad", "RMSProp", "LazyAdam decay", "Adam"])
def test_settings_of_torchs_that_are_ours(name, maximize):
    """A run under torch's optimizer continues with the same weight decay, L2 or decoupled."""
    kind, settings = TORCHS[name]
    weight, other = (torch.nn.Parameter(start().detach()) for _ in range(2))
    theirs, first = (kind([p], **settings, maximize=maximize) for p in (weight, other))
    grads = [start(seed=seed).detach() for seed in range(8)]
    run(theirs, weight, grads)
    run(first, other, grads[:4])
    ours = type(make(name, [start()]))([other])
    ours.load_state_dict(first.state_dict())
    run(ours, other, grads[4:])
    torch.testing.assert_close(other, weight, rtol=0, atol=1e-12)


# Momentum and amsgrad need states. AdamW has eps 0, since it adds eps in a different position.
TORCHS = {
    "SGD momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}),
    "RMSProp": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "weight_decay": 0.1}),
    "LazyAdam decay": (
        torch.optim.AdamW,
        {"lr": 0.1, "eps": 0, "amsgrad": True, "weight_decay": 0.1},
    ),
    "Adam": (torch.optim.Adam, {"lr": 0.1}),
}


def refuses_a_group(name, error, settings, message):
    first = start()
    optimizer = make(name, [first])
    with pytest.raises(error, match=message):
        optimizer.add_param_group({"params": [start(seed=1)], **settings})
    assert [group["params"] for group in optimizer.param_groups] == [[first]]


NO_NUMBERS = [
    ("LazyAdam", {"lr": "x"}, "LazyAdam: lr must be a number, got 'x'"),
    ("Adam", {"lr": None}, "Adam: lr must be a number, got None"),
    ("SGD", {"lr": torch.tensor([0.1, 0.2])}, "SGD: lr must be a number, got tensor"),
    ("Adagrad", {"eps": [1]}, r"Adagrad: eps must be a number, got \[1\]"),
    ("RMSProp", {"momentum": "a"}, "RMSProp: momentum must be a number, got 'a'"),
    ("Ftrl", {"l1": None}, "Ftrl: l1 must be a number, got None"),
]


@pytest.mark.parametrize(("name", "settings", "message"), NO_NUMBERS)
def test_what_is_no_number(name, settings, message):
    with pytest.raises(TypeError, match=message):
        make(name, [start()], **settings)
    refuses_a_group(name, TypeError, settings, message)


def test_a_module_in_place_of_its_parameters():
    model = torch.nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"LazyAdam: params .* pass its parameters\(\)"):
        sparsekit.optim.LazyAdam(model)
    with pytest.raises(TypeError, match=r"clip_grad_norm_: .* pass its parameters\(\)"):
        sparsekit.optim.clip_grad_norm_(model, 1.0)


GROUPS = [
    ("Adam", {"stochastic_rounding": True}, "Adam: there is no stochastic_rounding"),
    ("Adam", {"mode": "swep"}, "mode must be 'catch_up' or 'sweep', got 'swep'"),
    ("Adam", {"betas": (1, 2)}, "betas must be two numbers"),
    (
        "SGD catch_up",
        {"weight_decay": 0.1},
        "weight_decay does not go with .*, got 0.1",
    ),
    ("Adam", {"eps_convention": "tf"}, "must be 'torch' or 'tensorflow', got 'tf'"),
    ("LazyAdam", {"eps_convention": None}, "must be 'torch' or 'tensorflow', got None"),
    ("LazyAdam", {"lr": -1}, "lr must be >= 0, got -1"),
    ("RowWiseAdagrad", {"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
    ("RMSProp", {"weight_decay": -1}, "weight_decay must be >= 0, got -1"),
    ("Adagrad", {"eps": -1}, "eps must be >= 0, got -1"),
    ("Ftrl", {"l1": -1}, "l1 must be >= 0, got -1"),
    ("PartialRowWiseAdam", {"weight_decay": -1}, "Adam: weight_decay must be >= 0, got -1"),
    ("LazyLAMB", {"betas": (0.9, 1)}, "LazyLAMB: betas must be two numbers"),
    ("LazyLAMB", {"bias_correction": "row"}, "LazyLAMB: bias_correction must be 'global' or"),
    ("RMSProp", {"alpha": 2}, "alpha must be in"),
]


@pytest.mark.parametrize(("name", "settings", "message"), GROUPS)
def test_settings_of_a_group_are_checked(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, [{"params": [start()], **settings}])
    refuses_a_group(name, ValueError, settings, message)


def test_a_seed_is_an_int_of_64_bits():
    with pytest.raises(TypeError, match="SGD: seed must be an int, got None"):
        sparsekit.optim.SGD([start()], stochastic_rounding=True, seed=None)
    for seed in (-(2**63), 2**64 - 1):
        assert sparsekit.optim.SGD([start()], seed=seed).defaults["seed"] == seed
    for seed in (-(2**63) - 1, 2**64):
        with pytest.raises(ValueError, match=f"SGD: seed must be .*, got {seed}"):
            sparsekit.optim.SGD([start()], seed=seed)


def test_rounding_is_at_random_if_wanted_and_depends_on_the_seed():
    def trained(**settings):
        weight = start(torch.bfloat16)
        run(make("LazyAdam", [weight], **settings), weight, gradients(torch.bfloat16, 5))
        return weight

    one, two = (trained(stochastic_rounding=True, seed=seed) for seed in (1, 2))
    assert not same_bits(one, two)
    assert same_bits(one, trained(stochastic_rounding=True, seed=1))
    assert same_bits(trained(seed=1), trained(seed=2))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learning_rate_of_zero_moves_nothing(name):
    weight = start()
    optimizer = make(name, [weight])
    # A schedule may begin with a rate of 0; DCP also creates states with a step at rate 0.
    optimizer.param_groups[0]["lr"] = 0.0
    run(optimizer, weight, gradients(steps=3))
    assert same_bits(caught_up(optimizer, weight), start())


def test_row_wise_states_have_one_number_for_a_row():
    for shape in ((4, 3), (4, 2, 2), (4,)):
        weight = start(shape=shape)
        optimizer = make("RowWiseAdagrad", [weight], initial_accumulator_value=2.0)
        weight.grad = torch.full_like(weight, 3.0)
        optimizer.step()
        assert optimizer.state[weight]["sum"].tolist() == [11.0] * 4


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_empty_gradient_counts_as_a_step(name):
    weight = start()
    optimizer = make(name, [weight])
    nothing = sparse(torch.empty(0, dtype=torch.int64), torch.empty(0, DIM).double())
    run(optimizer, weight, [nothing])
    assert same_bits(caught_up(optimizer, weight), start())
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "Adam sweep"])
def test_a_step_touches_the_rows_of_its_gradient_only(name):
    """Under exact Adam too, whose other rows move only when they are read."""
    weight = start()
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(steps=3))
    before = weight.detach().clone()
    run(optimizer, weight, [sparse([3, 5], torch.ones(2, DIM).double())])
    assert (weight != before).any(1).nonzero().flatten().tolist() == [3, 5]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_groups_have_their_own_settings(name):
    weights = [start(seed=seed) for seed in range(2)]
    together = make(name, [{"params": weights[:1]}, {"params": weights[1:], "lr": 0.3}])
    apart = [start(seed=seed) for seed in range(2)]
    optimizers = [make(name, [apart[0]]), make(name, [apart[1]], lr=0.3)]
    for grad in gradients(steps=5):
        for weight in (*weights, *apart):
            weight.grad = grad
        for optimizer in (together, *optimizers):
            optimizer.step()
    for optimizer in (together, *optimizers):
        optimizer.state_dict()
    for one, other in zip(weights, apart, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_closure_and_scheduler(name):
    weight, other = start(), start()
    optimizer, again = make(name, [weight]), make(name, [other])
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    rate = again.param_groups[0]["lr"]

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        weight.grad = sparse([1, 4], torch.ones(2, DIM).double())
        return 3.5

    for step in range(4):
        assert optimizer.step(closure) == 3.5
        scheduler.step()
        again.param_groups[0]["lr"] = rate * 0.5**step
        run(again, other, [sparse([1, 4], torch.ones(2, DIM).double())])
    assert same_bits(caught_up(optimizer, weight), caught_up(again, other))
    assert not same_bits(weight, start())


def test_a_step_has_no_graph(monkeypatch):
    """A step builds no graph, even if its gradients have one from a backward with create_graph."""
    weight, enabled, update = start(), [], sparsekit.ops.update_rows_

    def recorded(*arguments, **options):
        enabled.append(torch.is_grad_enabled())
        update(*arguments, **options)

    monkeypatch.setattr(sparsekit.ops, "update_rows_", recorded)
    run(make("LazyAdam", [weight]), weight, gradients(steps=1))
    assert enabled == [False]


def test_compilers_end_their_graph_before_a_step(engine):
    if engine != "cpu":
        return  # torch.compile refuses the mode in which the host runner works
    compiled = torch.compile(make("SGD", [start()]).step, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="sparsekit"):
        compiled()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_that_fails_does_not_count(name):
    weight = start(torch.float32)
    optimizer = make(name, [weight])
    run(optimizer, weight, gradients(torch.float32, 1))
    weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[ROWS]]), torch.ones(1, DIM), (ROWS, DIM), check_invariants=False
    )
    before = weight.detach().clone()
    with pytest.raises(IndexError, match=rf"rows\[0\] is {ROWS}, but weight has {ROWS} rows"):
        optimizer.step()
    assert same_bits(weight, before)
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_models_learn(name):
    """A pooled layer and a dense layer learn under the same optimizer."""
    torch.manual_seed(0)
    layer = sparsekit.DistributedEmbedding("mean", 50, 8, 1, 3, name="learns")
    model = torch.nn.Sequential(layer, torch.nn.Flatten(), torch.nn.Linear(8, 1))
    lr = 0.05 if name != "Ftrl" else 0.5
    optimizer = make(name, model.parameters(), lr=lr, maximize=False)
    keys = torch.randint(0, 40, (64, 1, 3))
    target = (keys.float().mean((1, 2)) > 20).float()
    losses = []
    for _ in range(30):
        loss = ((model(keys).squeeze(1) - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.75 * losses[0], losses[::10]
