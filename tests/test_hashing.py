"""sparsekit.hashing agrees with the xxhash package, published answers and its documented rules."""

import array
import builtins
import collections
import doctest
import enum
import random
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxh64_oracle import oracle

import sparsekit
import sparsekit.hashing.values
from sparsekit.hashing import xxh64

SEEDS = st.one_of(st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 2**64 - 1))
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.one_of(TEXT, st.binary(max_size=80), st.integers(), st.none())
INTEGER_DTYPES = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
# Large enough for several threads to hash a list in parts.
MANY = 100_003


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


# The hash itself


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B97F4A7C15, 2**64 - 1])
def test_every_length_equals_xxhash(seed):
    values = [random.Random(length).randbytes(length) for length in range(301)]
    assert xxh64(values, seed).tolist() == [oracle(value, seed) for value in values]


@given(data=st.binary(max_size=300), seed=SEEDS)
def test_any_bytes_and_seed_equal_xxhash(data, seed):
    assert xxh64([data], seed).tolist() == [oracle(data, seed)]


@given(data=st.binary(min_size=1, max_size=100), position=st.integers(0, 99), bit=st.integers(0, 7))
def test_every_bit_counts(data, position, bit):
    changed = bytearray(data)
    changed[position % len(data)] ^= 1 << bit
    before, after = xxh64([data, bytes(changed)]).tolist()
    assert before != after


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("3", 0x26167C2AF5162CA4),
        ("item_42", 0xDC6235DA484F3050),
        ("", 0xEF46DB3751D8E999),
    ],
)
def test_known_answers(value, expected):
    (code,) = xxh64([value]).tolist()
    assert code % 2**64 == expected
    assert -(2**63) <= code < 2**63


def test_output_is_a_signed_int64_vector():
    codes = xxh64(["item_42", "3"])
    assert codes.dtype == torch.int64
    assert codes.shape == (2,)
    assert codes[0] == 0xDC6235DA484F3050 - 2**64
    assert xxh64([]).shape == (0,)
    assert xxh64(np.array([], dtype=np.int32)).shape == (0,)


def test_the_example_in_the_docstring():
    result = doctest.testmod(sparsekit.hashing.values, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert result.attempted > 0


# Types


@given(TEXT, SEEDS)
def test_str_counts_as_its_utf8_bytes(text, seed):
    as_str, as_bytes = xxh64([text, text.encode()], seed).tolist()
    assert as_str == as_bytes == oracle(text, seed)


@given(st.one_of(st.integers(), st.sampled_from([2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 0])))
def test_int_counts_as_its_decimal_text(number):
    as_int, as_str = xxh64([number, str(number)]).tolist()
    assert as_int == as_str == oracle(number)


def test_huge_int():
    number = 10**4000 + 7
    assert xxh64([number]).tolist() == [oracle(number)]


def test_none_counts_as_the_empty_string():
    assert len(set(xxh64([None, "", b""]).tolist())) == 1
    assert xxh64([None]).tolist() != xxh64(["None"]).tolist()


def test_numpy_scalars():
    values = [np.dtype(name).type(7) for name in INTEGER_DTYPES]
    assert xxh64(values).tolist() == [oracle(7)] * len(values)
    assert xxh64([np.str_("ab"), np.bytes_(b"ab")]).tolist() == [oracle("ab")] * 2


def test_subclasses_count_by_content():
    class Color(str, enum.Enum):
        RED = "red"

    class Level(enum.IntEnum):
        HIGH = 3

    class Loud(int):
        def __str__(self):
            return "loud"

    values = [Color.RED, Level.HIGH, Loud(2**70)]
    assert xxh64(values).tolist() == [oracle("red"), oracle(3), oracle(2**70)]


@given(st.lists(VALUES, max_size=20), SEEDS, st.randoms())
def test_a_code_does_not_depend_on_the_neighbours(values, seed, rng):
    shuffled = rng.sample(values, len(values))
    together = xxh64(shuffled, seed).tolist()
    assert together == [xxh64([value], seed).item() for value in shuffled]
    assert together == [oracle(value, seed) for value in shuffled]


# Containers


class Reversed(collections.abc.Sequence):
    """Sequence of a type that hashing does not know."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[len(self.items) - 1 - i]


def object_array(items):
    result = np.empty(len(items), dtype=object)
    for i, item in enumerate(items):
        result[i] = item
    return result


@pytest.mark.parametrize("container", [list, tuple, collections.deque, Reversed, object_array])
def test_sequences(container):
    values = container(["a", b"b", 3, None, "é", np.int16(-4), 2**64])
    assert xxh64(values).tolist() == [oracle(value) for value in values]


@given(st.data(), st.sampled_from(INTEGER_DTYPES), SEEDS)
def test_integer_arrays_and_tensors(data, name, seed):
    info = np.iinfo(name)
    numbers = data.draw(st.lists(st.integers(int(info.min), int(info.max)), max_size=80))
    expected = [oracle(number, seed) for number in numbers]
    values = np.array(numbers, dtype=name)
    assert xxh64(values, seed).tolist() == expected
    assert xxh64(torch.from_numpy(values), seed).tolist() == expected
    assert xxh64(values.astype(values.dtype.newbyteorder()), seed).tolist() == expected
    assert xxh64(values[::-2], seed).tolist() == expected[::-2]


@pytest.mark.parametrize("name", INTEGER_DTYPES)
def test_the_ends_of_integer_dtypes(name):
    values = np.array([np.iinfo(name).min, np.iinfo(name).max], dtype=name)
    assert xxh64(values).tolist() == [oracle(number) for number in values.tolist()]


def test_integer_sequences_that_are_no_arrays():
    assert xxh64(range(-2, 3)).tolist() == [oracle(number) for number in range(-2, 3)]
    assert xxh64(array.array("q", [5, -6])).tolist() == [oracle(5), oracle(-6)]


def test_string_arrays():
    words = ["item_1", "é", "", "日本"]
    expected = [oracle(word) for word in words]
    assert xxh64(np.array(words)).tolist() == expected
    assert xxh64(np.array([word.encode() for word in words])).tolist() == expected
    assert xxh64(np.array([b"a\0"])).tolist() == [oracle(b"a")]  # numpy drops trailing zeros
    assert xxh64([b"a\0"]).tolist() == [oracle(b"a\0")]


def test_masked_items_count_as_none():
    values = np.ma.masked_array([1, 2, 3], mask=[False, True, False])
    assert xxh64(values).tolist() == [oracle(1), oracle(None), oracle(3)]


@pytest.mark.usefixtures("four_threads")
@pytest.mark.parametrize(
    "make",
    [
        lambda i: f"item_{i}",
        lambda i: i * 977,
        lambda i: [f"item_{i}", b"%d" % i, None, i, f"é{i}", np.int64(i), -(10**20) - i][i % 7],
    ],
    ids=["str", "int", "mixed"],
)
def test_threads_give_the_same_codes(make):
    values = [make(i) for i in range(MANY)]
    assert xxh64(values).tolist() == [oracle(value) for value in values]


@pytest.mark.usefixtures("four_threads")
def test_threads_give_the_same_codes_for_arrays():
    values = np.arange(MANY) * 977 - MANY
    assert xxh64(values).tolist() == [oracle(value) for value in values.tolist()]


@pytest.mark.usefixtures("four_threads")
def test_a_bad_item_among_many_is_named():
    values = ["x"] * MANY
    values[MANY - 2] = 0.5
    with pytest.raises(TypeError, match=rf"values\[{MANY - 2}\] is of type float"):
        xxh64(values)


def test_items_are_not_kept():
    class Index:
        def __index__(self):
            return number

    number = 2**80
    values = ["é" * 5, "text" * 9, b"bytes" * 9, number, np.int64(7), Index()]
    before = [sys.getrefcount(value) for value in values]
    for _ in range(10):
        xxh64(values)
    assert [sys.getrefcount(value) for value in values] == before


def test_a_list_that_changes_while_it_is_hashed_counts_as_it_was():
    class Emptying:
        def __index__(self):
            values.clear()
            return 5

    values = ["a", Emptying(), "é", 2**80]
    assert xxh64(values).tolist() == [oracle("a"), oracle(5), oracle("é"), oracle(2**80)]
    assert values == []


# Refusals


class Bad:
    pass


class Raising:
    def __index__(self):
        raise RuntimeError("from __index__")


@pytest.mark.parametrize("container", [list, tuple, object_array])
@pytest.mark.parametrize(
    ("item", "kind"),
    [
        (True, "bool"),
        (np.False_, "numpy.bool"),
        (1.0, "float"),
        (float("nan"), "float"),
        (np.float32(1), "numpy.float32"),
        (Bad(), "Bad"),
        (bytearray(b"a"), "bytearray"),
        (["a"], "list"),
        (torch.tensor(True), "Tensor"),
        (torch.tensor(1), "Tensor"),
    ],
)
def test_items_of_other_types_are_refused(container, item, kind):
    values = container(["a", 2, item, "c"])
    with pytest.raises(TypeError, match=rf"values\[2\] is of type {kind}\S*; expected str, bytes"):
        xxh64(values)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfff"])
def test_lone_surrogates_are_refused(text):
    with pytest.raises(ValueError, match=r"values\[3\] is a str with a lone surrogate") as caught:
        xxh64(["a", "é", None, text])
    assert isinstance(caught.value.__cause__, UnicodeEncodeError)


@pytest.mark.skipif(not hasattr(sys, "get_int_max_str_digits"), reason="no limit in this Python")
def test_an_int_too_long_to_print_is_refused():
    number = 10 ** (sys.get_int_max_str_digits() + 1)
    with pytest.raises(ValueError, match=r"values\[1\] is an int with more digits than"):
        xxh64([1, number])


def test_errors_of_an_index_method_pass():
    with pytest.raises(RuntimeError, match="from __index__"):
        xxh64([Raising()])


def test_an_error_of_a_signal_handler_passes():
    """A signal handler's error is raised unchanged; only an error about a value names the value."""

    class Interrupt(Exception):
        pass

    def handler(*_):
        if sys._getframe(1).f_code.co_name == "_hash":
            raise Interrupt

    def hash_until_a_signal_comes():
        for _ in range(20):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
            xxh64([number])

    number = 7**200_000
    most_digits = sys.get_int_max_str_digits()
    before = signal.signal(signal.SIGVTALRM, handler)
    try:
        sys.set_int_max_str_digits(0)
        with pytest.raises(Interrupt):
            hash_until_a_signal_comes()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.set_int_max_str_digits(most_digits)


# Lists that change while they are hashed


class Clears:
    """Integer-like value whose conversion empties the list that contains it."""

    def __init__(self, items):
        self.items = items

    def __index__(self):
        # The items' memory is freed and very likely used for something else.
        self.items.clear()
        self.items.extend([b"x" * 40] * 7)
        return 5


@pytest.mark.parametrize("count", [3, 50_000])
def test_a_conversion_that_changes_the_list(count):
    values = []
    texts = [f"text {i}" for i in range(count)]
    values.extend([*texts, Clears(values), 10**30, Clears(values), *texts])
    codes = [oracle(text) for text in texts]
    expected = [*codes, oracle(5), oracle(10**30), oracle(5), *codes]
    assert xxh64(values).tolist() == expected
    assert len(values) == 7


@pytest.mark.parametrize("left", [0, 1, 10])
def test_an_import_hook_that_changes_the_list(monkeypatch, left):
    values = ["a", 3, None, 2**70, "é"]
    expected = [oracle(value) for value in values]
    imports = builtins.__import__

    def hook(*arguments, **keywords):
        values[:] = [bytes([1, 2, 3]) for _ in range(left)]
        return imports(*arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", hook)
    codes = xxh64(values).tolist()
    monkeypatch.undo()
    assert codes == expected
    assert len(values) in (left, 5)


def test_a_signal_handler_that_changes_the_list():
    """Python runs signal handlers while it converts a long int, in the middle of hashing."""
    number = 7**200_000
    texts = [f"text {i}" for i in range(5)]
    values = []

    def handler(*_):
        if values and sys._getframe(1).f_code.co_name == "_hash":
            values.clear()

    most_digits = sys.get_int_max_str_digits()
    before = signal.signal(signal.SIGVTALRM, handler)
    try:
        sys.set_int_max_str_digits(0)
        expected = [oracle(value) for value in (*texts, number, *texts)]
        for _ in range(20):
            values[:] = [*texts, 7**200_000, *texts]
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
            assert xxh64(values).tolist() == expected
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if not values:
                return
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        sys.set_int_max_str_digits(most_digits)
    pytest.fail("no signal came in time")


@pytest.mark.parametrize(
    "value", ["abc", b"abc", bytearray(b"abc"), memoryview(b"abc"), 3, None, np.int64(3), True]
)
def test_a_single_value_is_refused_with_a_hint(value):
    with pytest.raises(TypeError, match=rf"a single {type(value).__name__}.*xxh64\(\[value\]\)"):
        xxh64(value)


@pytest.mark.parametrize(
    "values", [{"a", "b"}, {"a": 1}, collections.UserDict(a=1), iter(["a"]), 2.5]
)
def test_containers_without_an_order_are_refused(values):
    with pytest.raises(TypeError, match=f"must be a sequence.*{type(values).__name__}"):
        xxh64(values)


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (np.array([True]), "bool"),
        (np.array([1.5]), "float64"),
        (np.ma.masked_array([1.5, 2.5], [True, False]), "float64"),
        (np.ma.masked_array([True, False], [True, False]), "bool"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), "datetime64"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([1.5]), "torch.float32"),
        (torch.tensor([1.5], dtype=torch.bfloat16), "torch.bfloat16"),
    ],
)
def test_arrays_of_other_dtypes_are_refused(values, dtype):
    with pytest.raises(TypeError, match=f"of dtype {dtype}.*expected integers"):
        xxh64(values)


@pytest.mark.parametrize(
    "values",
    [np.zeros((2, 3), dtype=int), np.array(3), torch.zeros(2, 3, dtype=torch.int64)],
)
def test_other_than_one_dimension_is_refused(values):
    with pytest.raises(ValueError, match=f"values must have one dimension, got {values.ndim}"):
        xxh64(values)


def test_a_tensor_is_hashed_on_its_device():
    codes = xxh64(torch.zeros(3, dtype=torch.int64, device="meta"))
    assert (codes.device.type, codes.shape, codes.dtype) == ("meta", (3,), torch.int64)


@pytest.mark.parametrize("seed", [-1, 2**64, 10**30])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match=rf"seed must be in \[0, 2\*\*64\), got {seed}"):
        xxh64(["a"], seed)


@pytest.mark.parametrize("seed", [1.0, "1", None])
def test_a_seed_of_another_type_is_refused(seed):
    with pytest.raises(TypeError, match=f"seed must be an int, got {type(seed).__name__}"):
        xxh64(["a"], seed)


@settings(max_examples=20)
@given(SEEDS, SEEDS)
def test_the_seed_matters(one, other):
    same = xxh64(["a", 1, None], one).tolist() == xxh64(["a", 1, None], other).tolist()
    assert same == (one == other)
