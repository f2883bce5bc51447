"""check_finite_gradients reports gradients with a NaN or an infinity."""

import math
import pickle

import pytest
import torch
from conftest import same_bits

import sparsekit
from sparsekit.optim.finite import NonFiniteGradientError, check_finite_gradients

# Keys in row order.
KEYS = [10**18, -7, 3, 0]
BAD = [math.nan, math.inf, -math.inf]


class Model(torch.nn.Module):
    def __init__(self, use_hashtable=True):
        super().__init__()
        self.clicks = sparsekit.DistributedEmbedding(
            "sum", 20, 3, 1, 4, use_hashtable=use_hashtable, name="user clicks"
        )
        self.head = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.PReLU())
        keys = torch.tensor([[KEYS if use_hashtable else [9, 8, 1, 0]]])
        self.head(self.clicks(keys)).sum().backward()

    @property
    def values(self):
        """Return the layer's gradient of four rows."""
        return self.clicks.weight.grad._values()


def error(module):
    with pytest.raises(NonFiniteGradientError) as caught:
        check_finite_gradients(module)
    return caught.value


def test_finite_gradients():
    model = Model()
    check_finite_gradients(model)
    model.zero_grad()
    check_finite_gradients(model)
    check_finite_gradients(torch.nn.ReLU())
    model.clicks.weight.data.fill_(math.nan)  # the weight is not a gradient
    check_finite_gradients(model)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row", range(len(KEYS)))
def test_the_key_of_a_row(row, bad):
    model = Model()
    model.values[row, 1] = bad
    model.values[row:, 2] = 0.0 * bad  # these rows also have a NaN in a later column
    found = error(model)
    assert (found.layer, found.key, found.rank) == ("user clicks", KEYS[row], 0)
    assert str(found) == (
        f"user clicks: the gradient on rank 0 has {bad} at key {KEYS[row]}, row {row}, column 1; "
        f"not finite in {len(KEYS) - row} row(s)"
    )


def test_the_key_without_a_hash_table():
    model = Model(use_hashtable=False)
    model.values[2, 0] = math.inf  # the gradient has rows 0, 1, 8 and 9
    found = error(model)
    assert found.key == 8
    assert "inf at key 8, row 8, column 0; not finite in 1 row(s)" in str(found)
    # Rank 1 of 2 has the odd keys.
    model.clicks.rank, model.clicks.world_size = 1, 2
    assert "key 17, row 8" in str(error(model))


def test_repeated_rows_count_as_their_sum():
    model = Model()
    rows, largest = torch.tensor([[3, 1, 3]]), torch.finfo(torch.float32).max
    values = torch.tensor([[0.0, largest, 0.0], [1.0, 1.0, 1.0], [0.0, largest, 0.0]])
    grad = torch.sparse_coo_tensor(rows, values, (20, 3), check_invariants=True)
    model.clicks.weight.grad = grad
    assert "inf at key 0, row 3, column 1; not finite in 1 row(s)" in str(error(model))
    assert model.clicks.weight.grad is grad
    assert not grad.is_coalesced()


@pytest.mark.parametrize(("row", "key"), [(2, 3), (4, None)])
def test_a_dense_gradient_of_a_layer(row, key):
    model = Model()
    model.clicks.weight.grad = torch.zeros(20, 3)
    model.clicks.weight.grad[row:, 2] = math.nan
    found = error(model)
    assert found.key == key
    assert f"key {key}, row {row}, column 2; not finite in {20 - row} row(s)" in str(found)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("name", "index"), [("head.0.weight", (1, 2)), ("head.0.bias", (1,)), ("head.1.weight", (0,))]
)
def test_dense_parameters(name, index, bad):
    model = Model()
    model.get_parameter(name).grad[index] = bad
    found = error(model)
    assert (found.layer, found.key, found.rank) == (name, None, 0)
    assert str(found) == f"{name}: the gradient on rank 0 has {bad} at index {index}"


def test_shapes_and_layouts_of_dense_parameters():
    module = torch.nn.Module()
    module.scalar = torch.nn.Parameter(torch.tensor(1.0))
    module.scalar.grad = torch.tensor(math.nan)
    assert str(error(module)).endswith("nan at index ()")
    module.scalar = torch.nn.Parameter(torch.zeros(3, 4, 5, 6))
    grad = torch.zeros(3, 4, 5, 6).to(memory_format=torch.channels_last)
    grad[1, 3, 0, 2] = grad[1, 2, 4, 1] = math.nan
    module.scalar.grad = grad
    assert str(error(module)).endswith("nan at index (1, 2, 4, 1)")
    table = torch.nn.Embedding(9, 2, sparse=True)
    table(torch.tensor([7, 7, 4])).sum().backward()
    table.weight.grad._values()[1, 1] = math.inf
    assert str(error(table)) == "weight: the gradient on rank 0 has inf at index (7, 1)"


def test_shared_parameters_are_reported_once():
    model = Model()
    model.again, model.tied = model.clicks, torch.nn.Linear(3, 2)
    model.tied.weight = model.head[0].weight
    model.values[0, 0] = model.tied.weight.grad[1, 1] = math.nan
    first, second = str(error(model)).splitlines()
    assert first.startswith("user clicks: ")
    assert second.startswith("head.0.weight: ")


@pytest.mark.parametrize(
    ("count", "last"),
    [
        (8, "7: the gradient on rank 0 has nan at index (0,)"),
        (9, "and 1 more gradients"),
        (30, "and 22 more gradients"),
    ],
)
def test_a_long_list_is_cut(count, last):
    model = torch.nn.ParameterList(torch.ones(2) for _ in range(count))
    for parameter in model:
        parameter.grad = torch.full((2,), math.nan)
    lines = str(error(model)).splitlines()
    assert len(lines) == min(count, 9)
    assert lines[-1] == last


def test_gradients_are_left_alone():
    model = Model()
    model.values[1] = math.nan
    before = [p.grad.to_dense() for p in model.parameters()]
    error(model)
    assert all(map(same_bits, [p.grad.to_dense() for p in model.parameters()], before))


def test_the_error_can_be_pickled():
    model = Model()
    model.values[1] = math.nan
    found = error(model)
    copy = pickle.loads(pickle.dumps(found))
    assert isinstance(copy, ArithmeticError)
    assert (str(copy), vars(copy)) == (str(found), vars(found))


def test_what_is_no_module():
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got generator"):
        check_finite_gradients(Model().parameters())
