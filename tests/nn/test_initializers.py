"""Tests of a layer's initializers: Uniform, Normal, Constant, or a function that fills a tensor."""

import functools
import math

import pytest
import torch

import sparsekit
from sparsekit.nn import Constant, Initializer, Normal, Uniform

N, DIM = 4000, 25


def start(initializer, dtype=torch.float64, seed=3, keys=None, **changes):
    """Return the initial vectors [n, DIM] of a layer with this initializer."""
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
    # With 100,000 draws, a deviation of more than five standard errors fails.
    assert values.mean() == pytest.approx((low + high) / 2, abs=5 * width / math.sqrt(12 * N * DIM))
    bins = torch.histc((values - low) / width, bins=20, min=0, max=1)
    expected = N * DIM / 20
    assert ((bins - expected).abs() < 5 * math.sqrt(expected)).all()


def test_uniform_never_rounds_up_to_high():
    assert (start(Uniform(1.0, 1 + 2**-23)) == 1.0).all()


def test_uniform_is_drawn_before_it_is_rounded_to_the_dtype():
    # Between 1 and 2, bfloat16 numbers are 2**-7 apart: half of the interval rounds up to its end.
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


init = torch.nn.init

# Functions, and the distribution that each uses for a table of 40 rows of 10 elements.
TRANSLATED = {
    "uniform_": (init.uniform_, Uniform(0.0, 1.0)),
    "normal_": (init.normal_, Normal(0.0, 1.0)),
    "partial": (functools.partial(init.normal_, mean=2.0, std=0.5), Normal(2.0, 0.5)),
    "constant_": (lambda t: init.constant_(t, 3.5), Constant(3.5)),
    "zeros_": (init.zeros_, Constant(0.0)),
    "ones_": (init.ones_, Constant(1.0)),
    "xavier_uniform_": (init.xavier_uniform_, Uniform(-math.sqrt(6 / 50), math.sqrt(6 / 50))),
    "xavier_normal_": (lambda t: init.xavier_normal_(t, 3), Normal(0.0, 3 * math.sqrt(2 / 50))),
    "kaiming_uniform_": (init.kaiming_uniform_, Uniform(-math.sqrt(6 / 10), math.sqrt(6 / 10))),
    "kaiming_normal_": (
        functools.partial(init.kaiming_normal_, mode="fan_out", nonlinearity="linear"),
        Normal(0.0, math.sqrt(1 / 40)),
    ),
    "method": (lambda t: t.data.uniform_(-2, 2), Uniform(-2, 2)),
    "without a result": (lambda t: [t.normal_(), None][1], Normal(0.0, 1.0)),
    "trunc_normal_": (functools.partial(init.trunc_normal_, std=0.02), Normal(0.0, 0.02)),
}


@pytest.mark.parametrize("use_hashtable", [True, False])
@pytest.mark.parametrize(("function", "same"), TRANSLATED.values(), ids=TRANSLATED.keys())
def test_functions_by_what_they_draw(function, same, use_hashtable):
    def made(initializer):
        return sparsekit.Embedding(
            40, 10, embedding_initializer=initializer, seed=3, use_hashtable=use_hashtable
        )

    layer = made(function)
    assert type(layer.initializer) is type(same)
    assert layer.initializer.numbers == pytest.approx(same.numbers)
    # As with any initializer, a value depends on seed, key and column only.
    keys = torch.arange(40)
    assert torch.equal(layer(keys.flip(0)).flip(0), made(layer.initializer)(keys))


OTHER = torch.ones(40, 10)

# Functions whose distribution cannot be determined, with a part of the error's message.
UNTRANSLATED = {
    "orthogonal_": (init.orthogonal_, "orthogonal_ does not tell .* no op that can be seen"),
    "eye_": (init.eye_, "it calls eye"),
    "trunc_normal_": (init.trunc_normal_, r"std=1.0 are not cut off at -2.0 and 2.0"),
    "cut off above": (functools.partial(init.trunc_normal_, a=-9, b=2), "at -9 and 2"),
    "trunc_normal_ in a function": (lambda t: init.trunc_normal_(t, std=0.02), "no op"),
    "two ops": (lambda t: t.normal_().mul_(2), "it calls normal_, mul_"),
    "a row of its own": (lambda t: t[0].zero_(), "it calls select, zero_"),
    "all but a column": (lambda t: t.narrow(1, 0, 9).normal_(), "it calls narrow|it calls slice"),
    "values": (lambda t: t.copy_(torch.arange(10.0)), "it calls arange, copy_"),
    "another op": (lambda t: t.exponential_(), "it calls exponential_"),
    "a generator": (lambda t: t.normal_(generator=torch.Generator()), "a generator"),
    "another tensor": (lambda t: [torch.zero_(OTHER), t][1], "it calls zero_"),
    "a look at values": (lambda t: t.fill_(float(t.sum())), "meta|Scalar"),
}


@pytest.mark.parametrize(("function", "message"), UNTRANSLATED.values(), ids=UNTRANSLATED.keys())
def test_other_functions_are_for_tables_without_hash_table(function, message):
    with pytest.raises(TypeError, match=f"^n: embedding_initializer .*{message}"):
        sparsekit.Embedding(40, 10, name="n", embedding_initializer=function)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    layers = [
        sparsekit.Embedding(40, 10, seed=seed, use_hashtable=False, embedding_initializer=function)
        for seed in (3, 3, 4)
    ]
    assert torch.equal(torch.rand(1), expected)  # torch's own random stream is not used.
    one, again, other = (layer.weight.detach().clone() for layer in layers)
    assert torch.equal(one, again)
    if function in (init.orthogonal_, init.trunc_normal_):
        assert not torch.equal(one, other)
    # Elements that the function does not write are zeros.
    assert one.any() == (message not in ("it calls select, zero_", "it calls zero_", "meta|Scalar"))
    layers[0].reset_parameters()
    assert torch.equal(layers[0].weight, one)


def test_a_generator_of_trunc_normal():
    function = functools.partial(init.trunc_normal_, std=0.02, generator=torch.Generator())
    with pytest.raises(TypeError, match=r"trunc_normal_ does not tell .* it has a generator"):
        sparsekit.Embedding(40, 10, embedding_initializer=function)


@pytest.mark.parametrize("use_hashtable", [True, False])
def test_functions_that_make_another_tensor(use_hashtable):
    with pytest.raises(TypeError, match=r"<lambda> returns another tensor than the one .* to fill"):
        sparsekit.Embedding(
            4, 2, use_hashtable=use_hashtable, embedding_initializer=lambda t: torch.randn_like(t)
        )


def test_a_function_that_cannot_fill_the_table():
    with pytest.raises(ValueError, match="division"):
        sparsekit.Embedding(4, 2, use_hashtable=False, embedding_initializer=_refuses)


def _refuses(tensor):
    raise ValueError("division")
