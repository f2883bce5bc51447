"""Rules, settings and states, for the suites of update_rows_ and catch_up_rows_ and gpu_check."""

import torch

# rule, settings, number of states. Rates are large, so that an error shows.
CASES = {
    "sgd": ("sgd", [0.1, 0.0, 0.01, 0], 0),
    "momentum": ("sgd", [0.1, 0.9, 0.01, 0], 1),
    "nesterov": ("sgd", [0.1, 0.8, 0.0, 1], 1),
    "lazy adam": ("adam", [0.1, 0.9, 0.999, 1e-3, 0.0, 0], 2),
    "weight decay": ("adam", [0.1, 0.8, 0.99, 1e-2, 0.1, 0], 2),
    "exact adam": ("adam", [0.1, 0.9, 0.99, 1e-2, 0.0, 1], 2),
    "amsgrad": ("adam", [0.1, 0.9, 0.99, 1e-3, 0.0, 1], 3),
    "adagrad": ("adagrad", [0.1, 0.2, 1e-3, 0, 0], 1),
    "row-wise adagrad": ("row_wise_adagrad", [0.1, 0.2, 1e-3, 0, 0], 1),
    "adagrad, L2": ("adagrad", [0.1, 0.2, 1e-3, 0.1, 0], 1),
    "adagrad, decoupled": ("adagrad", [0.1, 0.2, 1e-3, 0.1, 1], 1),
    "row-wise adagrad, L2": ("row_wise_adagrad", [0.1, 0.2, 1e-3, 0.1, 0], 1),
    "row-wise adagrad, decoupled": ("row_wise_adagrad", [0.1, 0.2, 1e-3, 0.1, 1], 1),
    "rms prop": ("rms_prop", [0.1, 0.9, 1e-2, 0.0, 0, 0, 0], 1),
    "rms prop of tensorflow": ("rms_prop", [0.1, 0.9, 1e-2, 0.0, 1, 0, 0], 1),
    "rms prop, momentum": ("rms_prop", [0.1, 0.9, 1e-2, 0.7, 0, 0, 0], 2),
    "rms prop of tensorflow, momentum": ("rms_prop", [0.1, 0.9, 1e-2, 0.7, 1, 0, 0], 2),
    "rms prop, L2": ("rms_prop", [0.1, 0.9, 1e-2, 0.0, 0, 0.1, 0], 1),
    "rms prop, momentum, decoupled": ("rms_prop", [0.1, 0.9, 1e-2, 0.7, 0, 0.1, 1], 2),
    "rms prop of tensorflow, L2, momentum": ("rms_prop", [0.1, 0.9, 1e-2, 0.7, 1, 0.1, 0], 2),
    "ftrl": ("ftrl", [0.5, 0.5, 0.25, -0.5], 2),
    "ftrl, another power": ("ftrl", [0.5, 0.5, 0.25, -0.75], 2),
}


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def wide(dtype):
    return torch.float32 if dtype == torch.bfloat16 else dtype


def table_of(case, num_rows, dim, dtype, together=True):
    """A weight and states as they are after some steps; positive where they are of squares.

    together: the states of a row are neighbours, as optimizers keep them.
    """
    rule, _, count = CASES[case]
    weight = random((num_rows, dim), dtype, seed=1)
    width = 1 if rule == "row_wise_adagrad" else dim
    space = torch.zeros(num_rows, count, width, dtype=wide(dtype))
    states = list(space.unbind(1)) if count else []
    if not together:
        states = [state.contiguous() for state in states]
    for k, state in enumerate(states):
        state.copy_(random((num_rows, width), wide(dtype), seed=2 + k))
        signed = (rule, k) in (("sgd", 0), ("adam", 0), ("rms_prop", 1), ("ftrl", 1))
        if not signed:
            state.square_()
    return weight, states


def distinct_rows(n, num_rows, seed=0):
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:n]


def copied(table, device=None, together=True):
    """The same on a device, with the states as they lie."""
    weight, states = table
    if not states:
        return weight.detach().clone().to(device), []
    space = torch.stack([s.cpu() for s in states], 1).to(device)
    own = list(space.unbind(1))
    return weight.detach().clone().to(device), own if together else [s.contiguous() for s in own]


def flat(table):
    return [table[0], *table[1]]
