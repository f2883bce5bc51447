"""Uniform, Normal and Constant as the initializers of a layer."""

import math

import pytest
import torch

import sparsekit
from sparsekit.nn import Constant, Initializer, Normal, Uniform

N, DIM = 4000, 25


def start(initializer, dtype=torch.float64, seed=3, keys=None, **changes):
    """The first vectors [n, DIM] of a layer with this initializer."""
    layer = sparsekit.All2AllDenseEmbedding(
        N, DIM, 1, 1, True, embedding_initializer=initializer, seed=seed, dtype=dtype, **changes
    )
    return layer(torch.arange(N) if keys is None else keys).detach()


@pytest.mark.parametrize("seed", [-(2**63), -5, -1, 0, 2**63 - 1])
def test_all_64_bits_of_a_seed_count(seed):
    values = start(Uniform(), seed=seed)
    assert torch.equal(start(Uniform(), seed=seed % 2**64), values)
    assert not torch.equal(start(Uniform(), seed=(seed + 2**63) % 2**64), values)


def test_default_is_uniform_within_five_hundredths():
    assert torch.equal(start(None), start(Uniform(-0.05, 0.05)))
    assert torch.equal(start(None), start(Uniform()))


@pytest.mark.parametrize(("low", "high"), [(-0.05, 0.05), (0.0, 1.0), (-3, 5)])
def test_uniform(low, high):
    values = start(Uniform(low, high))
    assert low - 1e-9 <= values.min()
    assert values.max() < high
    width = high - low
    # Of 100,000 draws; a deviation of five standard errors fails.
    assert values.mean() == pytest.approx((low + high) / 2, abs=5 * width / math.sqrt(12 * N * DIM))
    bins = torch.histc((values - low) / width, bins=20, min=0, max=1)
    expected = N * DIM / 20
    assert ((bins - expected).abs() < 5 * math.sqrt(expected)).all()


def test_uniform_never_rounds_up_to_high():
    assert (start(Uniform(1.0, 1 + 2**-23)) == 1.0).all()


def test_uniform_is_drawn_before_it_is_rounded_to_the_dtype():
    # From 1 on the numbers of bfloat16 are 2**-7 apart: half of the interval rounds up to its end.
    values, rounded = start(Uniform(1.0, 1 + 2**-7)), start(Uniform(1.0, 1 + 2**-7), torch.bfloat16)
    assert values.max() < 1 + 2**-7
    assert torch.equal(rounded, values.to(torch.bfloat16))
    assert (rounded == 1 + 2**-7).double().mean() == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 0.05), (2.0, 3.0), (-1, 0)])
def test_normal(mean, std):
    values = start(Normal(mean, std))
    n = N * DIM
    assert values.mean() == pytest.approx(mean, abs=5 * std / math.sqrt(n))
    assert values.std() == pytest.approx(std, abs=5 * std / math.sqrt(2 * n))
    if std > 0:
        z = (values - mean) / std
        for quantile in (-2, -1, 0, 1, 2):
            share = 0.5 * (1 + math.erf(quantile / math.sqrt(2)))
            found = (z < quantile).double().mean()
            assert found == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / n))


@pytest.mark.parametrize("value", [0.0, -1.5, 3])
def test_constant(value):
    assert (start(Constant(value)) == value).all()


@pytest.mark.parametrize("initializer", [Uniform(), Normal()], ids=str)
def test_elements_are_unrelated(initializer):
    values = start(initializer)
    assert len(values.unique()) > 0.99 * values.numel()
    for one, other in [(0, 1), (0, 4), (3, 4), (7, 24)]:
        columns = torch.corrcoef(values[:, [one, other]].T)[0, 1]
        assert abs(columns) < 5 / math.sqrt(N)
    neighbours = torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))[0, 1]
    assert abs(neighbours) < 5 / math.sqrt(N * DIM)
    seeds = torch.corrcoef(torch.stack([values.flatten(), start(initializer, seed=4).flatten()]))
    assert abs(seeds[0, 1]) < 5 / math.sqrt(N * DIM)


@pytest.mark.parametrize("initializer", [Uniform(), Normal(), Constant(0.1)], ids=str)
def test_a_function_of_seed_key_and_column(initializer):
    values = start(initializer)
    assert torch.equal(start(initializer), values)
    assert torch.equal(start(initializer, keys=torch.arange(N).flip(0)).flip(0), values)
    assert torch.equal(start(initializer, use_hashtable=False), values)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(start(initializer, dtype), values.to(dtype))
    wide = sparsekit.All2AllDenseEmbedding(
        N, DIM + 9, 1, 1, True, embedding_initializer=initializer, seed=3, dtype=torch.float64
    )
    assert torch.equal(wide(torch.arange(N))[:, :DIM], values)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Uniform(1.0, 1.0), r"Uniform\(low=1.0, high=1.0\): low must be below high"),
        (lambda: Uniform(2.0, -1.0), "low must be below high"),
        (lambda: Uniform(0.0, math.nan), "finite"),
        (lambda: Uniform(-math.inf, 0.0), "finite"),
        (lambda: Uniform(1e39, 1e40), "finite in float32"),
        (lambda: Uniform(-3e38, 3e38), "finite in float32"),
        (lambda: Normal(0.0, -1.0), r"Normal\(mean=0.0, std=-1.0\): std must not be negative"),
        (lambda: Normal(math.nan), "finite"),
        (lambda: Normal(0.0, math.inf), "finite"),
        (lambda: Constant(math.inf), r"Constant\(value=inf\): the parameters must be finite"),
    ],
)
def test_bad_parameters(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_equality_and_repr():
    assert Uniform() == Uniform(-0.05, 0.05)
    assert Normal() != Normal(std=0.1)
    assert repr(Constant(2)) == "Constant(value=2)"
    assert isinstance(Normal(), Initializer)
