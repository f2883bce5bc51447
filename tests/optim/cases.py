"""Provides weights and gradients for tests of optimizers, and all optimizers by name."""

import torch
from conftest import generator

from sparsekit import optim
from sparsekit.nn import EmbeddingWeight

ROWS, DIM, STEPS = 12, 5, 50
NEVER = 11  # no gradient touches this row
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}

# Optimizers that skip rows without a gradient. Large rates make errors visible.
TOUCHED = {
    "SGD": (optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "SGD momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "LazyAdam": (optim.LazyAdam, {"lr": 0.1}),
    "LazyAdam decay": (optim.LazyAdam, {"lr": 0.1, "weight_decay": 0.1, "amsgrad": True}),
    "LazyAdam per row": (optim.LazyAdam, {"lr": 0.1, "bias_correction": "per_row"}),
    "LazyAdam eps of torch": (
        optim.LazyAdam,
        {"lr": 0.1, "eps": 1e-2, "eps_convention": "torch", "maximize": True},
    ),
    "Adagrad": (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "initial_accumulator_value": 0.2}),
    "RowWiseAdagrad": (optim.RowWiseAdagrad, {"lr": 0.1}),
    "RowWiseAdagrad L2": (optim.RowWiseAdagrad, {"lr": 0.1, "weight_decay": 0.1}),
    "Adagrad decoupled": (
        optim.Adagrad,
        {"lr": 0.1, "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
    ),
    "RMSProp": (optim.RMSProp, {"lr": 0.1, "momentum": 0.5}),
    "RMSProp of TensorFlow": (optim.RMSProp, {"lr": 0.1, "form": "tensorflow", "momentum": 0.5}),
    "RMSProp L2": (optim.RMSProp, {"lr": 0.1, "weight_decay": 0.1}),
    "Ftrl": (optim.Ftrl, {"lr": 0.5, "l1": 0.1, "l2": 0.01}),
    "PartialRowWiseAdam": (optim.PartialRowWiseAdam, {"lr": 0.1, "weight_decay": 0.1}),
    "LazyLAMB": (
        optim.LazyLAMB,
        {"lr": 0.1, "weight_decay": 0.1, "bias_correction": "per_row", "maximize": True},
    ),
}
# Optimizers that update all rows.
ALL_ROWS = {
    "Adam": (optim.Adam, {"lr": 0.1}),
    "Adam sweep": (optim.Adam, {"lr": 0.1, "mode": "sweep"}),
    "Adam eps of TensorFlow": (
        optim.Adam,
        {"lr": 0.1, "eps": 1e-2, "eps_convention": "tensorflow"},
    ),
    "SGD catch_up": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "mode": "catch_up"}),
    "SGD nesterov catch_up": (
        optim.SGD,
        {"lr": 0.1, "momentum": 0.8, "nesterov": True, "mode": "catch_up"},
    ),
}
OPTIMIZERS = TOUCHED | ALL_ROWS


class TensorFlowAdam(torch.optim.Optimizer):
    """Adam for dense gradients as in TensorFlow's documentation, with its "epsilon hat"."""

    def __init__(self, params, lr=0.001, betas=(0.9, 0.999), eps=1e-7):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * p.grad
                v = state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * p.grad**2
                lr_t = group["lr"] * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
                p -= lr_t * m / (v.sqrt() + group["eps"])


def make(name, parameters, **settings):
    kind, own = OPTIMIZERS[name]
    return kind(parameters, **(own | settings))


def start(dtype=torch.float64, shape=(ROWS, DIM), seed=0):
    """Return the weight of an embedding layer before training."""
    weight = torch.randn(shape, generator=generator(seed), dtype=torch.float64)
    return EmbeddingWeight(weight.to(dtype))


def sparse(rows, values, num_rows=ROWS):
    rows = torch.as_tensor(rows).unsqueeze(0)
    size = (num_rows, *values.shape[1:])
    return torch.sparse_coo_tensor(rows, values, size, check_invariants=True)


def gradients(dtype=torch.float64, steps=STEPS):
    """Yield gradients of row 0 in all steps, row 1 in the first and last step, and random rows."""
    for step in range(steps):
        rows = torch.randint(2, NEVER, (6,), generator=generator(step)).tolist()
        rows += [0, 1] if step in (0, steps - 1) else [0]
        values = torch.randn(len(rows), DIM, generator=generator(100 + step), dtype=torch.float64)
        yield sparse(rows, values.to(dtype))


def run(optimizer, parameter, grads):
    for grad in grads:
        parameter.grad = grad
        if isinstance(parameter, EmbeddingWeight):
            parameter.note_version()
        assert optimizer.step() is None  # without a closure there is no loss
        # A step is not a manual write, after which a table would check its free rows.
        assert not isinstance(parameter, EmbeddingWeight) or not parameter.written()
