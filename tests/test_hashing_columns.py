"""sparsekit.hashing.xxh64 hashes Arrow columns and numpy arrays of text as it hashes lists."""

import ctypes
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from xxh64_oracle import oracle

from sparsekit import _pybind
from sparsekit.hashing import xxh64

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
# Lengths around xxh64's words (8 bytes) and stripes (32), and around a view's inline text (12).
WORDS = [None, "", "a", "é", *(("ab日c" * 20)[:n] for n in range(40))]
STRINGS = [pa.string(), pa.large_string(), pa.string_view()]
# Large enough for several threads to hash a column in parts.
MANY = 100_003


def check(column, values=None, seed=0):
    values = column.to_pylist() if values is None else values
    assert xxh64(column, seed).tolist() == [oracle(value, seed) for value in values]


@pytest.fixture
def four_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", STRINGS, ids=str)
def test_strings(kind):
    check(pa.array(WORDS, kind))
    check(pa.array(WORDS[1:], kind), seed=2**64 - 1)
    check(pa.array([], kind))


@pytest.mark.parametrize(
    "kind", [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)], ids=str
)
def test_binary(kind):
    array = pa.array([b"abc", None, b"\xff\0\0", b"xyz"], kind)
    check(array)
    check(array.slice(2))
    if kind != pa.binary(3):
        check(pa.array([b"", b"a" * 13, b"\0", b"b" * 100], kind))


@given(
    values=st.lists(st.one_of(st.none(), TEXT), max_size=30),
    kind=st.sampled_from([*STRINGS, pa.dictionary(pa.int8(), pa.string())]),
    data=st.data(),
)
@settings(max_examples=60)
def test_any_slices_and_chunks(values, kind, data):
    begin = data.draw(st.integers(0, len(values)))
    array = pa.array(values, pa.string()).cast(kind)
    check(array.slice(begin), values[begin:])
    check(pa.chunked_array([array, array.slice(0, begin), array.slice(begin)], kind), seed=7)


@pytest.mark.parametrize("bits", ["int8", "int16", "int32", "int64"])
@pytest.mark.parametrize("sign", ["", "u"])
def test_integers_count_as_their_decimal_text(bits, sign):
    ends = np.iinfo(sign + bits)
    array = pa.array([int(ends.min), None, int(ends.max), 0, 7], sign + bits)
    check(array)
    check(array.slice(1, 3))


def test_nulls_count_as_none_whatever_lies_there():
    text = pa.py_buffer(b"hidden")
    offsets = pa.py_buffer(np.array([0, 6, 6], np.int32))
    hidden = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\2"), offsets, text])
    entries = pa.array([None, "a"])
    for column in (
        hidden,
        pa.nulls(3),
        pa.chunked_array([pa.array(["a", None]), pa.array([None, "b"])]),
        pa.array([None, "a", None]).dictionary_encode(),
        pa.DictionaryArray.from_arrays(pa.array([0, 1, None]), entries),
    ):
        check(column)


@pytest.mark.parametrize("index", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint64"])
def test_dictionaries(index):
    array = pa.array(["a", "bcd", None, "a", "é" * 9]).cast(
        pa.dictionary(getattr(pa, index)(), pa.string())
    )
    check(array)
    check(array.slice(2))
    entries = pa.array(["x", "yz", "longer than a view", "w"], pa.string_view())
    for part in (entries, entries.slice(1), pa.array([5, 6, -7])):
        check(pa.DictionaryArray.from_arrays(pa.array([1, 0, 2], index), part))


def test_chunks_have_dictionaries_of_their_own():
    parts = [pa.array(words).dictionary_encode() for words in (["a", "b"], ["b", "c"])]
    check(pa.chunked_array([*parts, parts[0].slice(0, 0), parts[1], parts[1]]))
    entries = pa.array(["a", "b", "c", "d"])
    indices = pa.array([0, 1, 0])
    check(
        pa.chunked_array(
            [pa.DictionaryArray.from_arrays(indices, entries[i : i + 2]) for i in range(3)]
        )
    )


def test_an_index_without_an_entry_is_named():
    entries = pa.array(["a", "b"])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 9]), entries, safe=False)
    with pytest.raises(
        ValueError, match=r"values\[2\] names an entry that its dictionary does not"
    ):
        xxh64(column)
    negative = pa.DictionaryArray.from_arrays(pa.array([0, -1]), entries, safe=False)
    with pytest.raises(ValueError, match=r"values\[2\] names an entry"):
        xxh64(pa.chunked_array([column[1:2], negative]))


@pytest.mark.parametrize(
    ("column", "format"),
    [
        (pa.array([1.5]), "g"),
        (pa.array([True]), "b"),
        (pa.array([["a"]]), r"\+l"),
        (pa.table({"a": ["x"]}), r"\+s"),
        (pa.array([1.5, 1.5]).dictionary_encode(), "g"),
        (pa.array([1], pa.timestamp("s")), "tss:"),
    ],
    ids=["float", "bool", "list", "table", "dictionary", "timestamp"],
)
def test_other_types_are_refused(column, format):
    with pytest.raises(TypeError, match=f"an Arrow column of format '{format}'; expected strings"):
        xxh64(column)


def test_a_released_array_is_refused():
    capsules = pa.array(["a"]).__arrow_c_array__()
    pa.Array._import_from_c_capsule(*capsules)  # releases the capsules' array
    with pytest.raises(ValueError, match="has been released"):
        _pybind.xxh64_arrow(*capsules, seed=0)


class Failing:
    """Column of strings whose first chunk cannot be read."""

    def __init__(self):
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        text = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        self.message = ctypes.create_string_buffer(b"the disk is gone")
        self.calls = (
            kind(lambda _, schema: pa.string()._export_to_c(schema) or 0),
            kind(lambda *_: 5),
            text(lambda _: ctypes.addressof(self.message)),
        )
        pointers = [ctypes.cast(call, ctypes.c_void_p).value for call in self.calls]
        self.stream = (ctypes.c_void_p * 5)(*pointers, 1, None)

    def __arrow_c_stream__(self, requested_schema=None):
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
        )
        return new(ctypes.addressof(self.stream), b"arrow_array_stream", None)


def test_errors_of_a_stream_pass():
    with pytest.raises(OSError, match="values could not be read: the disk is gone"):
        xxh64(Failing())


@pytest.mark.usefixtures("four_threads")
def test_threads_give_the_same_codes():
    words = ["é" * (i % 3) + f"item {i}" if i % 11 else "" for i in range(MANY)]
    expected = [oracle(word) for word in words]
    array = pa.array([word or None for word in words])
    chunked = pa.chunked_array(
        [array.slice(0, 40_000), array.slice(40_000, 5), array.slice(40_005)]
    )
    for column in (
        words,
        array,
        chunked,
        array.cast(pa.string_view()),
        array.dictionary_encode(),
        np.array(words),
        np.array([word.encode() for word in words]),
        np.array(words, np.dtypes.StringDType()),
    ):
        assert xxh64(column).tolist() == expected
    check(pa.array([i * 977 if i % 7 else None for i in range(MANY)]))


def high_water():
    """Return the peak resident memory of this process in bytes."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@pytest.mark.parametrize("size", [50, 1024])
def test_no_copy_of_the_strings_is_made(size):
    """A copy of the 64 MB of text, or Python objects for the strings, would raise the peak."""
    count = 2**26 // size
    codes = 8 * count
    array = pa.concat_arrays([pa.array(["x" * size] * (count // 64))] * 64)
    chunked = pa.chunked_array([array.slice(5, count // 2), array.slice(0, count // 4)])
    xxh64(array[:2])
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets the peak
    before = high_water()
    for column in (array, chunked, array.slice(3)):
        xxh64(column)
    assert high_water() - before < codes + 8 * 2**20


def test_fixed_width_arrays():
    for words in (
        ["a", "", "éa", "\x80", "日本語", "😀", "x" * 40],
        [],
        ["", ""],
        ["a\0b", "\0", "ab\0"],
    ):
        trimmed = [word.rstrip("\0") for word in words]
        check(np.array(words, dtype="U"), trimmed)
        check(np.array([word.encode() for word in words], dtype="S"), trimmed)
    # The fields are strided and unaligned.
    table = np.array([(1, "ab", b"x"), (2, "é", b"yz")], dtype="i1,U3,S2")
    check(table["f1"], ["ab", "é"])
    check(table["f2"], [b"x", b"yz"])


@given(words=st.lists(TEXT, min_size=1, max_size=20), step=st.sampled_from([1, 2, -1, -3]))
@settings(max_examples=60)
def test_any_array_of_text(words, step):
    array, trimmed = np.array(words), [word.rstrip("\0") for word in words]
    check(array[::step], trimmed[::step])
    check(array.astype(array.dtype.newbyteorder())[::step], trimmed[::step])
    check(np.array([word.encode() for word in words])[::step], trimmed[::step])
    check(np.array(words, np.dtypes.StringDType())[::step], words[::step])


def test_missing_strings():
    masked = np.ma.masked_array(["a", "b"], mask=[False, True])
    check(masked, ["a", None])
    for missing in (None, np.nan):
        dtype = np.dtypes.StringDType(na_object=missing)
        check(np.array(["a", missing, "x" * 300, ""], dtype), ["a", None, "x" * 300, ""])
    # If a string stands for missing items, that string is hashed.
    stands_for = np.array(["a", "none"], np.dtypes.StringDType(na_object="none"))
    check(stands_for, ["a", "none"])


@pytest.mark.parametrize("point", [0xD800, 0xDFFF, 0x110000, 0xFFFFFFFF])
def test_code_points_that_are_no_characters_are_named(point):
    array = np.array(["a", "b", "ab", "ab"])
    array.view(np.uint32).reshape(4, 2)[2:, 1] = point
    with pytest.raises(ValueError, match=r"values\[2\] is a str with a lone surrogate"):
        xxh64(array)


class Series:
    """Stand-in for a pandas Series over a numpy array."""

    def __init__(self, array):
        self.array, self.dtype, self.ndim = array, array.dtype, 1

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __arrow_c_stream__(self, requested_schema=None):
        raise ImportError("pandas asks for pyarrow here")


def test_series():
    check(Series(np.array([3, -4])), [3, -4])
    check(Series(np.array(["a", None, 3], object)), ["a", None, 3])
    with pytest.raises(TypeError, match="dtype float64"):
        xxh64(Series(np.array([0.5])))


@pytest.mark.parametrize("make", [pa.array, np.array], ids=["arrow", "numpy"])
def test_other_threads_run_meanwhile(make):
    """Another thread makes progress during a long call: xxh64 releases the GIL."""
    column = make(["x" * 64] * 400_000)
    counts, stop = [], threading.Event()

    def count():
        while not stop.wait(0.0005):
            counts.append(None)

    thread = threading.Thread(target=count)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)
    try:
        before = len(counts)
        for _ in range(20):
            xxh64(column)
        seen = len(counts) - before
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert seen > 0
