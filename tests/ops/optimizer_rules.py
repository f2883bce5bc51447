"""Rules, settings and states for tests of update_rows_ and catch_up_rows_, and for gpu_check."""

import torch

# Rule, settings, number of states. Large rates make errors visible.
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
    "partial row-wise adam": ("partial_row_wise_adam", [0.1, 0.8, 0.99, 1e-2, 0.1], 2),
    "lamb": ("lamb", [0.1, 0.8, 0.99, 1e-2, 0.1], 2),
}
# ROW_WISE: rules whose last state has one value per row. PER_ROW: rules whose rows may count their
# own steps.
ROW_WISE = ("row_wise_adagrad", "partial_row_wise_adam")
PER_ROW = ("adam", "partial_row_wise_adam", "lamb")
_MOMENTS = [("sgd", 0), ("adam", 0), ("partial_row_wise_adam", 0), ("lamb", 0)]
# The states that may be negative, as pairs (rule, index of the state).
SIGNED = [*_MOMENTS, ("rms_prop", 1), ("ftrl", 1)]


def widths(rule, count, dim):
    """Return the number of columns of each state."""
    return [1 if rule in ROW_WISE and k == count - 1 else dim for k in range(count)]


def random(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def wide(dtype):
    return torch.float32 if dtype == torch.bfloat16 else dtype


def table_of(case, num_rows, dim, dtype, together=True):
    """Return a weight and states as after some steps; sums of squares are positive.

    together: if True, the states of a row are adjacent in memory, as in optimizers.
    """
    rule, _, count = CASES[case]
    weight = random((num_rows, dim), dtype, seed=1)
    states = []
    for k, width in enumerate(widths(rule, count, dim)):
        state = random((num_rows, width), wide(dtype), seed=2 + k)
        states.append(state if (rule, k) in SIGNED else state.square())
    return weight, _neighbours(states) if together else states


def _neighbours(states):
    """Copy states. In the copies, a row's states of the same width are adjacent in memory."""
    alike = [state for state in states if state.shape == states[0].shape]
    together = list(torch.stack(alike, 1).unbind(1)) if alike else []
    return [*together, *(state.clone() for state in states[len(alike) :])]


def distinct_rows(n, num_rows, seed=0):
    return torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[:n]


def copied(table, device=None, together=True):
    """Copy a table to a device; `together` lays out the states as in `table_of`."""
    weight, states = table
    own = [state.detach().to(device).contiguous() for state in states]
    own = _neighbours(own) if together else [state.clone() for state in own]
    return weight.detach().clone().to(device), own


def flat(table):
    return [table[0], *table[1]]
