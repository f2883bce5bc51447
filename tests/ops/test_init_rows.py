"""Philox gives the published numbers, and sparsekit.ops.init_rows_ equals the reference."""

import math

import pytest
import torch
from conftest import (
    KEY_EXTREMES,
    KEYS,
    ROW_DTYPES,
    assert_same_bits_for_any_threads,
    generator,
    key_pattern,
    misaligned,
    same_bits,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

from sparsekit import ops

DISTRIBUTIONS = {"constant": (0.1, 0.0), "uniform": (-0.05, 0.05), "normal": (0.5, 2.0)}
SEEDS = (0, 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)

all_distributions = pytest.mark.parametrize("distribution", DISTRIBUTIONS)


def vectors(keys, dim, device, dtype=torch.float32, **settings):
    out = torch.full((len(keys), dim), -777, dtype=dtype, device=device)
    ops.init_rows_(out, keys.to(device), **settings)
    return out.cpu()


def expected_vectors(keys, dim, dtype=torch.float32, **settings):
    out = torch.full((len(keys), dim), -777, dtype=dtype)
    reference.init_rows_(out, keys, **settings)
    return out


def assert_as_expected(result, expected, distribution, device):
    """Check for equal bits; on a GPU, a normal value may be the neighbouring float.

    A GPU implements sine and cosine in float64 differently; a different last bit may change the
    rounding to float32.
    """
    if device.type != "cuda" or distribution != "normal":
        assert same_bits(result, expected)
        return
    assert result.dtype == expected.dtype
    if expected.dtype == torch.float64:  # but the values were rounded to float32 first
        assert same_bits(result, result.float().double())
        result, expected = result.float(), expected.float()
    low, high = (
        torch.nextafter(expected, torch.full_like(expected, end)) for end in (-math.inf, math.inf)
    )
    assert result.shape == expected.shape
    assert ((low <= result) & (result <= high)).all()


def settings_of(distribution, seed=0):
    a, b = DISTRIBUTIONS[distribution]
    return {"distribution": distribution, "a": a, "b": b, "seed": seed}


# Known answers from kat_vectors of Random123, the library by the authors of Philox.
@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers_of_philox(counter, key, words):
    random = reference.philox4x32_10([torch.tensor([word]) for word in counter], tuple(key))
    assert " ".join(f"{word.item():08x}" for word in random) == words


def test_known_answer_of_the_op(device):
    # For seed 0 and key 0, columns 0 to 3 have 24 bits of each word of the first known answer.
    result = vectors(torch.tensor([0]), 4, device, a=0.0, b=1.0)
    words = [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert result.tolist() == [[(word >> 8) / 2**24 for word in words]]


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@all_distributions
@pytest.mark.parametrize("dim", [0, 1, 3, 6, 16, 64, 100, 128, 1024])
def test_equals_the_reference_bit_for_bit(device, dim, distribution, dtype):
    keys = torch.cat([torch.tensor(KEY_EXTREMES), key_pattern("half on one", 40)])
    settings = settings_of(distribution, seed=2**40 + 3)
    result = vectors(keys, dim, device, dtype, **settings)
    expected = expected_vectors(keys, dim, dtype, **settings)
    assert_as_expected(result, expected, distribution, device)


@pytest.mark.parametrize("dtype", ROW_DTYPES)
def test_what_a_gpu_is_allowed(dtype):
    gpu, exact = torch.device("cuda"), torch.tensor([[-3.0, -1e-3, 0.0], [1.0, 2.5, 3e4]])
    exact = exact.to(dtype)
    step = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    more = torch.nextafter(exact.to(step), torch.full_like(exact, math.inf, dtype=step))
    more = torch.where(torch.arange(3) == 1, more.to(dtype), exact)
    for result in (exact, more):
        assert_as_expected(result, exact, "normal", gpu)
        assert_as_expected(exact, result, "normal", gpu)
    too_much = torch.nextafter(more.to(step), torch.full_like(more, math.inf, dtype=step))
    for result, distribution, device in (
        (too_much.to(dtype), "normal", gpu),
        (more, "uniform", gpu),
        (more, "normal", torch.device("cpu")),
    ):
        with pytest.raises(AssertionError):
            assert_as_expected(result, exact, distribution, device)


@given(
    keys=st.lists(KEYS, max_size=20),
    dim=st.integers(1, 20),
    seed=st.one_of(st.sampled_from(SEEDS), st.integers(-(2**63), 2**64 - 1)),
    distribution=st.sampled_from(list(DISTRIBUTIONS)),
    a=st.floats(-1e3, 1e3),
    width=st.floats(0, 1e3),
)
def test_any_arguments(device, keys, dim, seed, distribution, a, width):
    keys = torch.tensor(keys, dtype=torch.int64)
    b = a + width if distribution == "uniform" else width
    settings = {"seed": seed, "distribution": distribution, "a": a, "b": b}
    result = vectors(keys, dim, device, **settings)
    assert_as_expected(result, expected_vectors(keys, dim, **settings), distribution, device)


@all_distributions
def test_rows_and_status(device, distribution):
    keys = key_pattern("distinct", 60)
    rows = torch.randperm(100, generator=generator(0))[:60]
    rows[::4] = -1
    for status in (None, torch.tensor([30, 0]), torch.tensor([100]), torch.tensor([-5])):
        out, expected = (torch.full((100, 7), -777.0) for _ in range(2))
        arguments = [keys, rows] if status is None else [keys, rows, status]
        ops.init_rows_(
            on_device := out.to(device),
            *[argument.to(device) for argument in arguments],
            **settings_of(distribution),
        )
        reference.init_rows_(expected, *arguments, **settings_of(distribution))
        assert_as_expected(on_device.cpu(), expected, distribution, device)
        untouched = torch.ones(100, dtype=torch.bool)
        untouched[rows[rows >= (0 if status is None else max(0, status[0].item()))]] = False
        assert (on_device.cpu()[untouched] == -777).all()


@all_distributions
def test_a_value_depends_on_seed_key_and_column_alone(device, distribution):
    settings = settings_of(distribution, seed=11)
    keys = key_pattern("distinct", 300)
    whole = vectors(keys, 13, device, **settings)
    # The order of keys makes no difference.
    order = torch.randperm(300, generator=generator(0))
    assert same_bits(vectors(keys[order], 13, device, **settings), whole[order])
    # Splitting into calls makes no difference.
    parts = [vectors(part, 13, device, **settings) for part in keys.split(7)]
    assert same_bits(torch.cat(parts), whole)
    # More columns do not change the first ones.
    for dim in (1, 4, 5, 12):
        assert same_bits(vectors(keys, dim, device, **settings), whole[:, :dim].contiguous())
    # The dtype changes only the rounding.
    assert same_bits(vectors(keys, 13, device, torch.float64, **settings), whole.double())
    assert same_bits(vectors(keys, 13, device, torch.bfloat16, **settings), whole.bfloat16())


def test_seeds(device):
    keys = torch.arange(50)
    results = [vectors(keys, 8, device, seed=seed) for seed in SEEDS]
    for i in range(len(SEEDS)):
        for j in range(i):
            assert (results[i] != results[j]).sum() > 390
    assert same_bits(vectors(keys, 8, device, seed=-1), results[-1])
    assert same_bits(vectors(keys, 8, device, seed=-(2**63)), vectors(keys, 8, device, seed=2**63))


def test_neighbouring_keys_and_columns_share_nothing(device):
    keys = torch.tensor([k + (hi << 32) for hi in range(-20, 20) for k in range(50)])
    values = vectors(keys, 16, device, torch.float32, a=0.0, b=1.0)
    # Among 32,000 draws of 24 bits, about 30 pairs are equal by chance.
    assert len(values.unique()) > values.numel() - 80


@pytest.mark.parametrize(("a", "b"), [(-0.05, 0.05), (0.0, 1.0), (3.0, 7.0), (-1e-30, 1e-30)])
def test_uniform_range_and_moments(device, a, b):
    values = vectors(torch.arange(4000), 64, device, a=a, b=b).double()
    low, high = torch.tensor([a, b]).tolist()
    assert low <= values.min()
    assert values.max() < high
    u = (values - a) / (b - a)
    n = u.numel()
    assert u.min() < 1e-4
    assert u.max() > 1 - 1e-4
    # Each bound is 5 standard errors.
    assert abs(u.mean() - 1 / 2) < 5 * math.sqrt(1 / 12 / n)
    assert abs(u.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    share = torch.histc(u, 100, 0, 1) / n
    assert (share - 0.01).abs().max() < 5 * math.sqrt(0.01 / n)


@pytest.mark.parametrize(("a", "b"), [(1.0, 1.0 + 2**-23), (-1.0, -1.0 + 2**-24), (0.1, 0.1)])
def test_uniform_leaves_out_its_upper_end(device, a, b):
    # The interval holds a single float, its lower end; rounding must not add the upper end.
    values = vectors(torch.arange(1000), 4, device, a=a, b=b)
    assert (values == torch.tensor(a)).all()


def test_normal_moments(device):
    mean, std = 3.0, 0.25
    settings = {"distribution": "normal", "a": mean, "b": std}
    z = (vectors(torch.arange(4000), 64, device, **settings).double() - mean) / std
    n = z.numel()
    # E z^k is 0, 1, 0, 3, with the standard error sqrt(E z^2k - (E z^k)^2) / sqrt(n).
    for k, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((z**k).mean() - moment) < 5 * math.sqrt(variance / n)
    assert abs((z.abs() < 1).double().mean() - math.erf(1 / math.sqrt(2))) < 5 * 0.5 / n**0.5
    assert 3.9 < z.abs().max() < 7
    # Box-Muller makes columns in pairs; neither the columns nor their squares may correlate.
    for other in (1, 2, 4):
        pair = z[:, :-other] * z[:, other:]
        assert abs(pair.mean()) < 5 / math.sqrt(pair.numel())
        pair = (z[:, :-other] ** 2 - 1) * (z[:, other:] ** 2 - 1)
        assert abs(pair.mean()) < 5 * 2 / math.sqrt(pair.numel())


def test_non_contiguous_keys_and_rows(device):
    # Make the views on the device: copying them to it would make them contiguous.
    keys = torch.arange(80, device=device)[::2]
    rows = torch.arange(79, -1, -1, device=device)[::2]
    assert not keys.is_contiguous()
    assert not rows.is_contiguous()
    out, expected = torch.zeros(80, 3, device=device), torch.zeros(80, 3)
    ops.init_rows_(out, keys, rows)
    reference.init_rows_(expected, keys.cpu(), rows.cpu())
    assert same_bits(out.cpu(), expected)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", ROW_DTYPES)
@all_distributions
@pytest.mark.parametrize("dim", [16, 128])
def test_rows_that_are_not_aligned(device, dim, distribution, dtype):
    keys, rows = torch.arange(5, device=device) * 10**15, torch.tensor([4, -1, 0, 2, 1])
    aligned = torch.full((5, dim), -777, dtype=dtype, device=device)
    out = misaligned(aligned)
    for to in (aligned, out):
        ops.init_rows_(to, keys, rows.to(device), **settings_of(distribution, seed=9))
    assert same_bits(out, aligned)
    assert (out[3] == -777).all()
    assert (out[[0, 1, 2, 4]] != -777).all()


def test_bits_do_not_depend_on_threads(device):
    keys = key_pattern("distinct", 3000)
    assert_same_bits_for_any_threads(lambda: [vectors(keys, 21, device, distribution="normal")])


@pytest.mark.parametrize(
    ("out", "arguments", "error", "message"),
    [
        ((3,), {}, ValueError, r"out must have 2 dimension\(s\)"),
        ((2, 2), {}, ValueError, "out must have size 3 in dimension 0, got 2"),
        ((3, 2), {"keys": torch.ones(3)}, TypeError, "keys must be int64"),
        ((3, 2), {"keys": torch.ones(3, 1).long()}, ValueError, "keys must have 1 dim"),
        ((3, 2), {"rows": torch.tensor([0])}, ValueError, "rows must have size 3"),
        ((3, 2), {"rows": torch.ones(3)}, ValueError, "rows must have dtype Long"),
        ((3, 2), {"rows": torch.tensor([0, 3, 9])}, IndexError, r"rows\[1\] is 3, but out has 3"),
        ((3, 2), {"distribution": "gamma"}, ValueError, "distribution must be one of.*'gamma'"),
        ((3, 2), {"status": torch.tensor([]).long()}, ValueError, "status must not be empty"),
        ((3, 2), {"keys": torch.ones(3).long().to("meta")}, ValueError, "keys on meta"),
        ((3, 2), {"rows": torch.ones(3).long().to("meta")}, ValueError, "rows on meta"),
        ((3, 2), {"status": torch.ones(2).long().to("meta")}, ValueError, "status on meta"),
    ],
)
def test_what_is_refused(out, arguments, error, message):
    with pytest.raises(error, match=f"init_rows_: .*{message}"):
        ops.init_rows_(torch.zeros(out), **{"keys": torch.tensor([1, 2, 3]), **arguments})


def test_out_must_be_contiguous_and_of_a_row_dtype():
    keys = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="out must be contiguous"):
        ops.init_rows_(torch.zeros(3, 2).t(), keys)
    with pytest.raises(TypeError, match="out must be float32 or float64 or bfloat16, got"):
        ops.init_rows_(torch.zeros(2, 3).half(), keys)
