"""Under a convention named after a library, an optimizer equals that library's.

SOK tests its Adam on a layer and a dense part with random ids, and compares with tf.keras: learning
rate 0.1, eps 1e-7, tolerance 1e-4. FBGEMM's tests compare a few steps of each optimizer with its
published formula: tolerance 1e-3. Here eps is 1e-4, with which the two conventions differ clearly.
"""

import copy

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit import optim

from .cases import OPTIMIZERS, ROWS, TensorFlowAdam, gradients, make, run, start

pytestmark = pytest.mark.usefixtures("engine")

SEEDS = range(4)
SOK = {"lr": 0.1, "eps": 1e-7, "eps_convention": "tensorflow"}


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (optim.Adam, {}, 0.909),
        (optim.Adam, {"eps_convention": "tensorflow"}, 0.240),
        (optim.LazyAdam, {}, 0.240),
        (optim.LazyAdam, {"eps_convention": "torch"}, 0.909),
    ],
)
def test_first_step_where_eps_matters(kind, settings, expected):
    weight = torch.nn.Parameter(torch.zeros(1, 1, dtype=torch.float64))
    optimizer = kind([weight], lr=1.0, eps=1e-7, **settings)
    weight.grad = torch.full_like(weight, 1e-6)
    optimizer.step()
    assert -weight.item() == pytest.approx(expected, abs=5e-4)


class SokDemo:
    """SOK's demo: vectors of all slots side by side, a dense layer of ones, a binary label.

    `expected` and `theirs` compute the formula in float64, with separate gradients.
    """

    def __init__(self, form, seed, dtype=torch.float32, **settings):
        self.generator = torch.Generator().manual_seed(seed)
        self.slots, self.nnz, self.dim, self.ids = 10, 4 if form == "sparse" else 1, 4, 200
        kind, arguments = {
            "sparse": (sparsekit.DistributedEmbedding, ["mean", self.ids, self.dim]),
            "dense": (sparsekit.All2AllDenseEmbedding, [self.ids, self.dim]),
        }[form]
        self.layer = kind(*arguments, self.slots, self.nnz, use_hashtable=False, name="demo",
                          dtype=dtype)  # fmt: skip
        self.head = torch.nn.Linear(self.slots * self.dim, 1, dtype=dtype)
        torch.nn.init.ones_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        self.parameters = [self.layer.weight, *self.head.parameters()]
        self.expected = [torch.nn.Parameter(p.detach().clone().double()) for p in self.parameters]
        self.ours = optim.Adam(self.parameters, **(SOK | settings))
        self.theirs = TensorFlowAdam(self.expected, lr=SOK["lr"], eps=SOK["eps"])

    def batch(self, size=512):
        shape = (size, self.slots, self.nnz)
        keys = torch.randint(0, self.ids, shape, generator=self.generator)
        labels = torch.randint(0, 2, (size,), generator=self.generator)
        return keys, labels

    def step(self, keys, labels):
        """Take a step in each model; return the largest difference of vectors before the step."""
        vectors = self.layer(keys).flatten(1)
        table, weight, bias = self.expected
        wanted = table[keys].mean(2).flatten(1)
        outputs = self.head(vectors), torch.nn.functional.linear(wanted, weight, bias)
        for optimizer, output in zip((self.ours, self.theirs), outputs, strict=True):
            optimizer.zero_grad()
            target = labels.to(output.dtype)[:, None]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(output, target)
            (loss / 128).backward()  # like the mean over SOK's 65,536 samples
            optimizer.step()
        return (vectors - wanted).abs().max().item()


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("mode", ["catch_up", "sweep"])
@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("seed", SEEDS)
def test_demos_of_sok(form, seed, mode, dtype):
    demo = SokDemo(form, seed, dtype, mode=mode)
    assert max(demo.step(*demo.batch()) for _ in range(10)) < 1e-4


@pytest.mark.parametrize("form", ["sparse", "dense"])
def test_the_demos_of_sok_tell_the_conventions_apart(form):
    demo = SokDemo(form, 0, eps_convention="torch")
    assert max(demo.step(*demo.batch()) for _ in range(10)) > 1e-3


# FBGEMM's formulas for one row: gradient g, weight w, states by name, step t.
EPS, LR, DECAY = 1e-4, 0.05, 0.1
BETAS = {"betas": (0.9, 0.99)}


def fbgemm_adam(w, g, s, t, decay=0.0):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g**2
    m_hat, v_hat = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
    return w - LR * (m_hat / (v_hat.sqrt() + EPS) + decay * w)


def fbgemm_adam_by_row(w, g, s, t):
    s["count"] = s.get("count", 0) + 1
    return fbgemm_adam(w, g, s, s["count"])


def fbgemm_adagrad(w, g, s, t):
    s["sum"] = s.get("sum", 0) + g**2
    return w - LR * g / (s["sum"].sqrt() + EPS)


def fbgemm_row_wise_adagrad(mode):
    def step(w, g, s, t):
        with_decay = g + DECAY * w if mode == "L2" else g
        s["sum"] = s.get("sum", 0) + (with_decay**2).sum() / len(g)
        multiplier = LR / (s["sum"].sqrt() + EPS)
        correction = {"": 1, "L2": 1 - multiplier * DECAY, "decoupled": 1 - LR * DECAY}[mode]
        return correction * w - multiplier * g

    return step


def fbgemm_partial_row_wise_adam(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * (g**2).sum() / len(g)
    m_hat, v_hat = s["m"] / (1 - 0.9**t), s["v"] / (1 - 0.99**t)
    return w - LR * (m_hat / (v_hat.sqrt() + EPS) + DECAY * w)


def fbgemm_lamb(w, g, s, t):
    s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
    s["v"] = 0.99 * s.get("v", 0) + 0.01 * g**2
    r = s["m"] / (1 - 0.9**t) / ((s["v"] / (1 - 0.99**t)).sqrt() + EPS) + DECAY * w
    return w - LR * (w**2).sum().sqrt() / (r**2).sum().sqrt() * r


FBGEMM = {
    "ADAM": (optim.LazyAdam, {**BETAS, "eps_convention": "torch"}, fbgemm_adam),
    "ADAM, weight decay": (
        optim.LazyAdam,
        {**BETAS, "eps_convention": "torch", "weight_decay": DECAY},
        lambda *row: fbgemm_adam(*row, decay=DECAY),
    ),
    "ADAM, use_rowwise_bias_correction": (
        optim.LazyAdam,
        {**BETAS, "eps_convention": "torch", "bias_correction": "per_row"},
        fbgemm_adam_by_row,
    ),
    "EXACT_ADAGRAD": (optim.Adagrad, {}, fbgemm_adagrad),
    "EXACT_ROWWISE_ADAGRAD": (optim.RowWiseAdagrad, {}, fbgemm_row_wise_adagrad("")),
    "EXACT_ROWWISE_ADAGRAD, L2": (
        optim.RowWiseAdagrad,
        {"weight_decay": DECAY},
        fbgemm_row_wise_adagrad("L2"),
    ),
    "EXACT_ROWWISE_ADAGRAD, DECOUPLE": (
        optim.RowWiseAdagrad,
        {"weight_decay": DECAY, "decoupled_weight_decay": True},
        fbgemm_row_wise_adagrad("decoupled"),
    ),
    "PARTIAL_ROWWISE_ADAM": (
        optim.PartialRowWiseAdam,
        {**BETAS, "weight_decay": DECAY},
        fbgemm_partial_row_wise_adam,
    ),
    "LAMB": (optim.LazyLAMB, {**BETAS, "weight_decay": DECAY}, fbgemm_lamb),
}


def far_from_fbgemm(name, seed, scale, **settings):
    """Return the largest difference from FBGEMM's formula after ten steps, for this scale."""
    kind, own, formula = FBGEMM[name]
    weight = start(torch.float32, seed=seed)
    optimizer = kind([weight], lr=LR, eps=EPS, **(own | settings))
    rows, states = list(weight.detach().double()), [{} for _ in range(ROWS)]
    generator = torch.Generator().manual_seed(seed)
    for t in range(1, 11):
        touched = torch.randperm(ROWS, generator=generator)[:6].sort().values
        grad = scale * torch.randn(6, weight.shape[1], generator=generator)
        weight.grad = torch.sparse_coo_tensor(
            touched[None], grad, weight.shape, check_invariants=True, is_coalesced=True
        )
        optimizer.step()
        for row, g in zip(touched.tolist(), grad.double(), strict=True):
            rows[row] = formula(rows[row], g, states[row], t)
    return (weight.detach() - torch.stack(rows)).abs().max().item()


@pytest.mark.pairs
@pytest.mark.parametrize("scale", [1.0, 1e-4])
@pytest.mark.parametrize("name", FBGEMM)
@pytest.mark.parametrize("seed", SEEDS)
def test_formulas_of_fbgemm(name, seed, scale):
    assert far_from_fbgemm(name, seed, scale) < 1e-3


def test_the_formulas_of_fbgemm_tell_the_conventions_apart():
    assert far_from_fbgemm("ADAM", 0, 1e-4, eps_convention="tensorflow") > 1e-2


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_maximize_negates_gradients(name, dtype):
    """With maximize, the caller's gradients stay unchanged."""
    weight, other = start(dtype), start(dtype)
    grads = [grad.coalesce() for grad in gradients(dtype, 10)]
    kept = [grad._values().clone() for grad in grads]
    optimizers = make(name, [weight], maximize=True), make(name, [other], maximize=False)
    run(optimizers[0], weight, grads)
    run(optimizers[1], other, [-grad for grad in grads])
    for optimizer in optimizers:
        optimizer.state_dict()  # late rows catch up
    assert same_bits(weight, other)
    for state, value in optimizers[0].state[weight].items():
        assert same_bits(value, optimizers[1].state[other][state])
    for grad, values in zip(grads, kept, strict=True):
        assert same_bits(grad._values(), values)


@pytest.mark.parametrize(
    ("kind", "setting", "value"),
    [
        (optim.LazyAdam, "eps_convention", "torch"),
        (optim.LazyAdam, "amsgrad", True),
        (optim.Adam, "eps_convention", "tensorflow"),
        (optim.Adagrad, "decoupled_weight_decay", True),
        (optim.RMSProp, "weight_decay", 0.25),
        (optim.Ftrl, "maximize", True),
    ],
)
def test_a_loaded_state_brings_its_convention(kind, setting, value):
    weight, other = start(), start()
    optimizer, resumed = kind([weight], **{setting: value}), kind([other])
    run(optimizer, weight, gradients(steps=2))
    resumed.load_state_dict(optimizer.state_dict())
    assert resumed.param_groups[0][setting] == value
    # A state saved before the setting existed gets the setting's current default.
    state = optimizer.state_dict()
    del state["param_groups"][0][setting]
    resumed = kind([start()])
    resumed.load_state_dict(state)
    assert resumed.param_groups[0][setting] == resumed.defaults[setting] != value
    # The groups may have been created with another value, for which the states differ.
    groups = [{"params": [start()]} for _ in range(2)]
    optimizer = kind(copy.deepcopy(groups))
    run(optimizer, *optimizer.param_groups[0]["params"], gradients(steps=2))
    resumed = kind([{**group, setting: value} for group in groups])
    state = optimizer.state_dict()
    for saved in state["param_groups"]:
        del saved[setting]
    resumed.load_state_dict(state)
    assert [g[setting] for g in resumed.param_groups] == [resumed.defaults[setting]] * 2


def test_a_state_of_torch_before_its_first_step_with_momentum():
    """A state of torch in which momentum is None and the step count is missing can be loaded."""
    weight, other = start(), start()
    optimizer = torch.optim.SGD([weight], lr=0.1)
    resumed = optim.SGD([other], lr=0.1)
    run(optimizer, weight, gradients(steps=1))
    optimizer.param_groups[0]["momentum"] = 0.9
    state = optimizer.state_dict()
    state["state"][0] = {"momentum_buffer": None}
    resumed.load_state_dict(state)
    assert not resumed.state[other]["momentum_buffer"].any()
    run(resumed, other, gradients(steps=1))
    assert resumed.state[other]["momentum_buffer"].any()


@pytest.mark.parametrize(
    ("setting", "state"),
    [({"amsgrad": True}, "max_exp_avg_sq"), ({"bias_correction": "per_row"}, "row_step")],
)
def test_a_setting_that_needs_another_state(setting, state):
    """The additional state starts from zeros, and the moments are kept."""
    weight, other = start(), start()
    changed, same = (optim.LazyAdam([p], lr=0.1) for p in (weight, other))
    grads = list(gradients(steps=4))
    run(changed, weight, grads[:3])
    run(same, other, grads[:3])
    changed.param_groups[0].update(setting)
    run(changed, weight, grads[3:])
    run(same, other, grads[3:])
    states = changed.state[weight], same.state[other]
    assert states[0].keys() == {*states[1], state}
    for name, value in states[1].items():
        assert same_bits(states[0][name], value), name
    touched = torch.zeros(ROWS, dtype=torch.bool)
    touched[grads[3].coalesce().indices()[0]] = True
    assert torch.equal(states[0][state].reshape(ROWS, -1).any(1), touched)


def test_a_convention_that_changes_between_steps():
    """Late rows catch up under the convention that was set in the missed steps."""
    weight, other = start(), start()
    late, swept = (optim.Adam([p], lr=0.1, eps=0.1, mode=mode)
                   for p, mode in ((weight, "catch_up"), (other, "sweep")))  # fmt: skip
    grads = list(gradients(steps=12))
    for optimizer, p in ((late, weight), (swept, other)):
        run(optimizer, p, grads[:6])
        optimizer.param_groups[0]["eps_convention"] = "tensorflow"
        run(optimizer, p, grads[6:])
    late.catch_up(weight)
    assert same_bits(weight, other)
