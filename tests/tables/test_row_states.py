"""States of optimizers follow their keys, as in a dict of key to state."""

import pytest
import torch

from sparsekit import optim
from sparsekit.nn import EmbeddingWeight
from sparsekit.tables.row_states import follow_keys

CAPACITY, DIM = 6, 2
T = torch.tensor
INITIAL = 0.5


def optimizer_of(weight, initial):
    """Return a torch optimizer whose second parameter group of three contains the weight."""
    others = [torch.nn.Parameter(torch.zeros(3)) for _ in range(3)]
    groups = [{"params": [other], "initial_accumulator_value": 9.0} for other in others]
    groups[1] = {"params": [others[1], weight]}
    if initial is not None:
        groups[1]["initial_accumulator_value"] = initial
        return torch.optim.Adagrad(groups)
    return torch.optim.SGD([{"params": each["params"]} for each in groups], lr=0.1)


def states(optimizer, weight, **tensors):
    """Set and return the states of a weight; element (r, c) of `sum` is r + 1 + c / 10."""
    rows = torch.arange(1.0, CAPACITY + 1)[:, None] + torch.arange(DIM) / 10
    state = {"sum": rows.clone(), "other": rows * 10, "of_row": rows[:, 0].clone(), **tensors}
    state["step"] = T(3.0)
    state["few"] = torch.ones(CAPACITY - 1)
    optimizer.state[weight] = state
    return state


BEFORE_AND_NOW = {
    "the same": ([7, 8, 9], [7, 8, 9]),
    "more": ([7, 8], [7, 8, 9, 10]),
    "fewer": ([7, 8, 9], [7]),
    "none now": ([7, 8, 9], []),
    "none before": ([], [7, 8]),
    "neither": ([], []),
    "other order": ([7, 8, 9], [9, 7, 8]),
    "the last differs": ([7, 8, 9], [7, 8, -1]),
    "the first differs": ([7, 8, 9], [5, 8, 9, 7]),
    "all differ": ([7, 8], [9, 10, 11]),
    "some come back": ([7, 8, 9, 10, 11, 12], [12, 5, 9, 6, 8]),
    "full": ([7, 8, 9, 10, 11, 12], [7, 8, 9, 10, 11, 12]),
    "full and turned": ([7, 8, 9, 10, 11, 12], [12, 11, 10, 9, 8, 7]),
}


def expected_rows(tensor, before, now, initial):
    """Return the rows of a state after a change of keys, computed with a dict of key to row."""
    of_key = dict(zip(before, tensor.clone(), strict=False))
    made = torch.full_like(tensor, initial)
    moved = before[: len(now)] != now[: len(before)]
    if before and not moved:  # rows past those of the old keys never had a state
        made[len(before) :] = tensor[len(before) :]
    for row, key in enumerate(now):
        if key in of_key:
            made[row] = of_key[key]
    return made


@pytest.mark.parametrize("initial", [None, 0.0, INITIAL])
@pytest.mark.parametrize(("before", "now"), BEFORE_AND_NOW.values(), ids=BEFORE_AND_NOW)
def test_states_are_where_their_keys_are(before, now, initial):
    weight = torch.nn.Parameter(torch.zeros(CAPACITY, DIM))
    optimizer = optimizer_of(weight, initial)
    state = states(optimizer, weight, keys=T(before, dtype=torch.int64))
    values = {name: tensor.clone() for name, tensor in state.items()}
    keys = T(now, dtype=torch.int64)
    with torch.device("meta"):  # nothing may be made on the default device
        follow_keys(optimizer, weight, keys)
    found = optimizer.state[weight]
    assert found.keys() == values.keys() - {"keys"}
    for name in ("sum", "other", "of_row"):
        start = (initial or 0.0) if name == "sum" else 0.0
        assert torch.equal(found[name], expected_rows(values[name], before, now, start)), name
    assert found["step"] is state["step"]
    assert found["few"] is state["few"]
    moved = before[: len(now)] != now[: len(before)]
    if moved:  # an interruption leaves the states as they were, with their keys
        assert "keys" in state
        assert all(torch.equal(state[name], values[name]) for name in values)
    else:
        assert found is state


@pytest.mark.parametrize("before", [[7, 8, 9], []])
@pytest.mark.parametrize("now", [[9, 7, 8], [7, 8, 9], [7], [5, 6], []])
def test_a_sparse_state_moves_with_its_keys(now, before):
    weight = torch.nn.Parameter(torch.zeros(CAPACITY, DIM))
    optimizer = optimizer_of(weight, None)
    dense = torch.zeros(CAPACITY, DIM)
    dense[0], dense[2] = 1, 3
    momentum = torch.sparse_coo_tensor([[2, 0, 2]], [[1.0, 1], [1, 1], [2, 2]], (CAPACITY, DIM))
    state = states(optimizer, weight, keys=T(before, dtype=torch.int64), momentum_buffer=momentum)
    turned = state["sum"].clone()
    keys = T(now, dtype=torch.int64)
    with torch.device("meta"):
        follow_keys(optimizer, weight, keys)
    found = optimizer.state[weight]
    assert found["momentum_buffer"].is_coalesced()
    assert found["momentum_buffer"].shape == (CAPACITY, DIM)
    kept = expected_rows(dense, before, now, 0.0)
    assert torch.equal(found["momentum_buffer"].to_dense(), kept)
    for row, key in enumerate(now):
        expected = turned[key - 7] if key in before else torch.zeros(DIM)
        assert torch.equal(found["sum"][row], expected)
    assert not found["sum"][len(now) :].any()


def test_an_optimizer_says_its_own_initial_values():
    weight = torch.nn.Parameter(torch.zeros(CAPACITY, DIM))
    optimizer = optimizer_of(weight, INITIAL)
    asked = []

    def initial_values(of, group):
        asked.append((of is weight, group is optimizer.param_groups[1]))
        return {"of_row": 4.0}

    optimizer.initial_values = initial_values
    states(optimizer, weight, keys=T([7, 8]))
    follow_keys(optimizer, weight, T([8]))
    assert asked == [(True, True)]
    found = optimizer.state[weight]
    assert found["of_row"].tolist() == [2] + [4] * 5
    assert found["sum"][:, 0].tolist() == [2] + [0] * 5


@pytest.mark.parametrize("state", [None, {}, {"sum": torch.ones(CAPACITY, DIM)}])
def test_states_without_keys_stay(state):
    weight = torch.nn.Parameter(torch.zeros(CAPACITY, DIM))
    optimizer = optimizer_of(weight, None)
    if state is not None:
        optimizer.state[weight] = state
    follow_keys(optimizer, weight, T([9]))
    assert (weight in optimizer.state) == (state is not None)
    assert state is None or optimizer.state[weight] is state
    assert not state or (state.keys() == {"sum"} and bool((state["sum"] == 1).all()))


def test_states_whose_keys_are_unknown_belong_to_the_rows_of_now():
    weight = torch.nn.Parameter(torch.zeros(CAPACITY, DIM))
    optimizer = optimizer_of(weight, INITIAL)
    state = states(optimizer, weight, keys=None)
    before = state["sum"].clone()
    follow_keys(optimizer, weight, T([9]))
    assert "keys" not in state
    assert torch.equal(state["sum"], before)


def test_states_that_share_memory_keep_to_it():
    """States that are adjacent in memory, as in our optimizers, are still so after a move."""
    weight = EmbeddingWeight(torch.zeros(CAPACITY, DIM))
    optimizer = optim.LazyAdam([weight])
    both = torch.arange(24.0).view(CAPACITY, 2, DIM)
    optimizer.state[weight] = {"exp_avg": both[:, 0], "exp_avg_sq": both[:, 1], "keys": T([7, 8])}
    follow_keys(optimizer, weight, T([8, 7]))
    found = optimizer.state[weight]
    assert [found[name].stride() for name in ("exp_avg", "exp_avg_sq")] == [(4, 1), (4, 1)]
    offset = found["exp_avg_sq"].data_ptr() - found["exp_avg"].data_ptr()
    assert offset == DIM * 4
    assert found["exp_avg"][:2].tolist() == [[4, 5], [0, 1]]
    assert found["exp_avg_sq"][:2].tolist() == [[6, 7], [2, 3]]
