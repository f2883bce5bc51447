"""Tests of initializers: numbers for the ops, bounds, and the rows of a rank."""

import math

import pytest
import torch

from sparsekit.ops.init_rows import DISTRIBUTIONS
from sparsekit.tables.init_function import Filled
from sparsekit.tables.initializers import Constant, Initializer, Normal, Uniform

MAX = torch.finfo(torch.float32).max
init = torch.nn.init


@pytest.mark.parametrize(
    ("initializer", "name", "a", "b"),
    [
        (Uniform(), "uniform", -0.05, 0.05),
        (Uniform(1.0, 3.0), "uniform", 1.0, 3.0),
        (Normal(), "normal", 0.0, 0.05),
        (Normal(2.0, 0.0), "normal", 2.0, 0.0),
        (Constant(), "constant", 0.0, 0.0),
        (Constant(MAX), "constant", MAX, 0.0),
        (Constant(-MAX), "constant", -MAX, 0.0),
        (Uniform(0.0, MAX), "uniform", 0.0, MAX),
        (Filled(init.eye_), "constant", 0.0, 0.0),
    ],
    ids=str,
)
def test_numbers_of_a_distribution(initializer, name, a, b):
    assert initializer.numbers == (DISTRIBUTIONS[name], a, b)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(2.0, 2.0), r"Uniform\(low=2.0, high=2.0\): low must be below high"),
        (lambda: Normal(0.0, -0.1), r"Normal\(mean=0.0, std=-0.1\): std must not be negative"),
        (lambda: Uniform(-MAX, MAX), "Uniform.*: the parameters must be finite in float32"),
        (lambda: Normal(-MAX, MAX), "Normal.*: the parameters must be finite in float32"),
        (lambda: Constant(-math.inf), "Constant.*: the parameters must be finite in float32"),
        (lambda: Constant(math.nan), "Constant.*: the parameters must be finite in float32"),
        (lambda: Uniform(0.0, 2 * MAX), "Uniform.*: the parameters must be finite in float32"),
    ],
)
def test_parameters_that_are_refused(make, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        make()


def test_a_base_has_no_distribution():
    with pytest.raises(NotImplementedError):
        Initializer()


KEYS = torch.tensor([5, -7, 2**40])


@pytest.mark.parametrize("initializer", [Uniform(), Normal(), Constant(3.0)], ids=str)
def test_rows_and_status_say_where_vectors_are_written(initializer):
    expected = torch.zeros(3, 2)
    initializer.write_(expected, KEYS, seed=-5)
    assert bool(expected.any())
    out = torch.zeros(6, 2)
    initializer.write_(out, KEYS, torch.tensor([4, 0, 1]), seed=-5)
    assert torch.equal(out[[4, 0, 1]], expected)
    assert not out[[2, 3, 5]].any()
    # The first word of the status is the first new row; only new rows are written.
    out.zero_()
    initializer.write_(out, KEYS, torch.tensor([4, 0, 1]), torch.tensor([1, 0]), seed=-5)
    assert torch.equal(out[[4, 1]], expected[[0, 2]])
    assert not out[[0, 2, 3, 5]].any()
    if initializer != Constant(3.0):
        other = torch.zeros(3, 2)
        initializer.write_(other, KEYS, seed=5)
        assert not torch.equal(other, expected)


def orthogonal(tensor):
    return init.orthogonal_(tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("initializer", [Uniform(), Normal(), Filled(orthogonal)], ids=str)
def test_a_rank_fills_its_rows_as_one_process_would(initializer, dtype):
    whole, state = torch.zeros(12, 4, dtype=dtype), torch.get_rng_state()
    initializer.fill_(whole, 0, 1, seed=3)
    for rank in range(3):
        own = torch.zeros(4, 4, dtype=dtype)
        initializer.fill_(own, rank, 3, seed=3)
        assert torch.equal(own, whole[rank::3])
    assert torch.equal(torch.get_rng_state(), state)
    other = torch.zeros(12, 4, dtype=dtype)
    initializer.fill_(other, 0, 1, seed=4)
    assert not torch.equal(other, whole)


def test_a_fill_is_no_write_that_is_counted():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    version = weight._version
    Uniform().fill_(weight, 0, 1, seed=3)
    assert weight._version == version
