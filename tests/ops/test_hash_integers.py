"""sparsekit.ops.hash_integers equals the reference, which hashes the decimal text."""

import pytest
import torch
from conftest import KEY_EXTREMES, KEYS, assert_same_bits_for_any_threads
from hypothesis import given
from hypothesis import strategies as st
from reference import ops as reference

from sparsekit import ops
from sparsekit.hashing import xxh64
from sparsekit.ops.hash_integers import INTEGER_DTYPES

# The smallest and largest integers with each number of digits, positive and negative.
LENGTHS = [sign * (10**k + step) for k in range(19) for step in (-1, 0, 1) for sign in (1, -1)]


def check(values, device, seed=0):
    codes = ops.hash_integers(values.to(device), seed)
    assert codes.dtype == torch.int64
    assert codes.tolist() == reference.hash_integers(values, seed).tolist()


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_every_number_of_digits(device, seed):
    check(torch.tensor([*LENGTHS, *KEY_EXTREMES]), device, seed)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES, ids=str)
def test_the_ends_of_dtypes(device, dtype):
    ends = torch.iinfo(dtype)
    check(torch.tensor([ends.min, ends.max, 7, 0], dtype=dtype), device)


def test_unsigned_numbers_of_twenty_digits(device):
    numbers = [2**64 - 1, 2**63, 10**19, 10**19 - 1, 12345678901234567890]
    check(torch.tensor(numbers, dtype=torch.uint64), device)


@given(st.lists(KEYS, max_size=80), st.integers(0, 2**64 - 1))
def test_any_integers(device, values, seed):
    check(torch.tensor(values, dtype=torch.int64), device, seed)


@pytest.mark.parametrize("n", [0, 1, 255, 257, 1000])
def test_sizes_and_strides(device, n):
    values = torch.arange(3 * n)[::3] * 977 - 1000
    check(values, device)
    assert xxh64(values.to(device)).tolist() == xxh64(list(map(str, values.tolist()))).tolist()


def test_threads_make_no_difference():
    assert_same_bits_for_any_threads(lambda: (ops.hash_integers(torch.arange(100_003) * 977),))


@pytest.mark.parametrize(
    ("values", "seed", "error", "message"),
    [
        (torch.ones(2), 0, TypeError, "values must be int64 or .*, got torch.float32"),
        (torch.ones(2, dtype=torch.bool), 0, TypeError, "got torch.bool"),
        (torch.ones(2, 2).long(), 0, ValueError, "1 dimension"),
        (torch.ones(2).long(), -1, ValueError, "seed must be in"),
        (torch.ones(2).long(), 2**64, ValueError, "seed must be in"),
    ],
)
def test_what_is_refused(device, values, seed, error, message):
    with pytest.raises(error, match=f"hash_integers: .*{message}"):
        ops.hash_integers(values.to(device), seed)


def test_the_op_itself_takes_int64(device):
    with pytest.raises((TypeError, ValueError), match="hash_integers: values"):
        torch.ops.sparsekit.hash_integers(torch.ones(2, dtype=torch.int32).to(device), False, 0)
