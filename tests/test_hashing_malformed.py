"""sparsekit.hashing.xxh64 refuses Arrow columns whose offsets, views or structs are wrong.

SPARSEKIT_FUZZ_FILES=10000 tries that many faults instead of 300.
"""

import ctypes
import os
import random
import re

import numpy as np
import pyarrow as pa
import pytest
from xxh64_oracle import oracle

from sparsekit import _pybind
from sparsekit.hashing import xxh64

CASES = int(os.environ.get("SPARSEKIT_FUZZ_FILES", "300"))
OUTSIDE = r"values\[{}\] is outside of its column's memory: malformed offsets or views"
LONG = b"longer than a view"


def from_offsets(kind, offsets, text=b"hello world", valid=None):
    dtype = np.int64 if kind in (pa.large_string(), pa.large_binary()) else np.int32
    offsets = np.array(offsets, dtype)
    buffers = [valid, pa.py_buffer(offsets), pa.py_buffer(text)]
    return pa.Array.from_buffers(kind, len(offsets) - 1, buffers)


def from_views(views, text=LONG * 3, valid=None):
    """Return a column of string views, each (size,) or, for a long text, (size, buffer, offset)."""
    words = np.zeros((len(views), 4), np.int32)
    for word, (size, *where) in zip(words, views, strict=True):
        word[0] = size
        word[2:] = where or 0
    buffers = [valid, pa.py_buffer(words.tobytes()), pa.py_buffer(text)]
    return pa.Array.from_buffers(pa.string_view(), len(views), buffers)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_binary()], ids=str)
@pytest.mark.parametrize(
    ("offsets", "position"),
    [
        ([0, 3, 10**9, 11], 1),
        ([0, 12, 11], 0),
        ([0, 5, 4, 11], 1),
        ([0, 5, -4, 11], 1),
        # As int32, the difference of the two middle offsets wraps around to -1.
        ([0, -(2**31), 2**31 - 1, 11], 0),
        ([0, 3, -10, 20, 11], 1),
    ],
)
def test_offsets(kind, offsets, position):
    column = from_offsets(kind, offsets)
    with pytest.raises(ValueError, match=OUTSIDE.format(position)):
        xxh64(column)
    whole = from_offsets(kind, [0, 5, 11])
    with pytest.raises(ValueError, match=OUTSIDE.format(position + 2)):
        xxh64(pa.chunked_array([whole, column]))
    with pytest.raises(ValueError, match=OUTSIDE.format(position)):
        xxh64(pa.chunked_array([column, column]))


@pytest.mark.parametrize(
    "view",
    [
        (-1, 0, 0),
        (-(2**31), 0, 0),
        (18, 1, 0),
        (18, -1, 0),
        (18, 2**31 - 1, 0),
        (18, 0, -1),
        (18, 0, 37),
        (2**31 - 1, 0, 2**31 - 1),
    ],
)
def test_views(view):
    good = (18, 0, 36)
    assert xxh64(from_views([(3,), good])).tolist() == [oracle(b"\0" * 3), oracle(LONG)]
    with pytest.raises(ValueError, match=OUTSIDE.format(2)):
        xxh64(from_views([(3,), good, view]))
    # The view of a null item may hold anything.
    column = from_views([(3,), view, good], valid=pa.py_buffer(b"\5"))
    assert xxh64(column).tolist() == [oracle(b"\0" * 3), oracle(None), oracle(LONG)]


def test_the_first_is_named_whichever_thread_finds_it():
    offsets = np.arange(0, 200_001, dtype=np.int32)
    offsets[[70_001, 150_001]] = 10**9
    with pytest.raises(ValueError, match=OUTSIDE.format(70_000)):
        _pybind.xxh64_arrow(
            *from_offsets(pa.binary(), offsets, b"x" * 200_000).__arrow_c_array__(), 0, 4
        )


def test_entries_of_a_dictionary():
    entries = from_offsets(pa.string(), [0, 5, 10**9, 11])
    column = pa.DictionaryArray.from_arrays(pa.array([0, 0]), entries, safe=False)
    words = rf"entry 1 of the dictionary of {OUTSIDE.format(0)}"
    with pytest.raises(ValueError, match=f"^{words}"):
        xxh64(column)


def ipc(column, change=lambda stream: None):
    """Write a column to a stream, change the stream and read it; reading checks almost nothing."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("a", column.type)])) as writer:
        writer.write_batch(pa.record_batch([column], ["a"]))
    stream = bytearray(sink.getvalue().to_pybytes())
    change(stream)
    return pa.ipc.open_stream(bytes(stream)).read_all()["a"]


def replace(old, new):
    def change(stream):
        place = stream.index(old)
        stream[place : place + len(new)] = new

    return change


@pytest.mark.parametrize(
    ("offsets", "reason"),
    [([0, 5, 10**9], "Length spanned by binary offsets"), ([-9, 5, 11], "Negative offsets")],
)
def test_what_reaches_beyond_a_buffer_of_pyarrow(offsets, reason):
    """Offsets beyond a buffer raise an error, since pyarrow knows the sizes of its buffers."""
    before, after = np.array([0, 5, 11], np.int32), np.array(offsets, np.int32)
    column = ipc(from_offsets(pa.binary(), before), replace(before.tobytes(), after.tobytes()))
    whole = pa.array([b"a", b"b"])
    with pytest.raises(ValueError, match=rf"malformed Arrow column from values\[3\] on: {reason}"):
        xxh64(pa.chunked_array([whole[:1], whole, *column.chunks]))


class Array(ctypes.Structure):
    """The struct ArrowArray of Arrow's C data interface."""


Array._fields_ = [
    *(
        (name, ctypes.c_int64)
        for name in ("length", "null_count", "offset", "n_buffers", "n_children")
    ),
    ("buffers", ctypes.POINTER(ctypes.c_void_p)),
    ("children", ctypes.c_void_p),
    ("dictionary", ctypes.POINTER(Array)),
    ("release", ctypes.c_void_p),
    ("private", ctypes.c_void_p),
]
ctypes.pythonapi.PyCapsule_GetPointer.restype = ctypes.c_void_p
ctypes.pythonapi.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


def hash_changed(column, change):
    """Hash an array as exported by another package, after a change in the exported struct."""
    schema, array = column.__arrow_c_array__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer(array, b"arrow_array")
    struct = ctypes.cast(pointer, ctypes.POINTER(Array)).contents
    whole = Array.from_buffer_copy(struct)
    buffers = [struct.buffers[i] for i in range(struct.n_buffers)]
    change(struct)
    try:
        return _pybind.xxh64_arrow(schema, array, 0)
    finally:  # restore the struct for the release
        for name, _ in Array._fields_:
            setattr(struct, name, getattr(whole, name))
        for i, buffer in enumerate(buffers):
            struct.buffers[i] = buffer


def set_to(name, value):
    return lambda struct: setattr(struct, name, value)


def without_buffer(which):
    def change(struct):
        struct.buffers[which] = None

    return change


TEXTS, VIEWS = pa.array(["a", "bc", None]), pa.array([LONG.decode(), "bc"], pa.string_view())
CODED = pa.array(["a", "b"]).dictionary_encode()


@pytest.mark.parametrize(
    ("column", "change", "reason"),
    [
        (TEXTS, set_to("length", -1), "its length or offset is out of range"),
        (TEXTS, set_to("offset", -1), "its length or offset is out of range"),
        (TEXTS, set_to("offset", 2**63 - 1), "its length or offset is out of range"),
        (TEXTS, set_to("n_buffers", 2), "another number of buffers than its type"),
        (TEXTS, set_to("buffers", None), "another number of buffers than its type"),
        (TEXTS, without_buffer(0), "it has nulls, but no bitmap"),
        (TEXTS, without_buffer(1), "it has no buffer of values"),
        (TEXTS, without_buffer(2), "it has no buffer of texts"),
        (TEXTS.cast(pa.large_string()), without_buffer(2), "it has no buffer of texts"),
        (pa.array([1, 2]), without_buffer(1), "it has no buffer of values"),
        (pa.array([b"ab"], pa.binary(2)), set_to("n_buffers", 1), "another number of buffers"),
        (VIEWS, set_to("n_buffers", 2), "another number of buffers than its type"),
        (VIEWS, without_buffer(3), "it does not tell the sizes of its buffers"),
        (CODED, set_to("dictionary", None), "it has no dictionary"),
        (CODED, without_buffer(1), "it has no buffer of values"),
        (CODED, lambda s: without_buffer(1)(s.dictionary.contents), "it has no buffer of values"),
    ],
)
def test_structs(column, change, reason):
    with pytest.raises(
        ValueError, match=rf"malformed Arrow column from values\[0\] on: .*{reason}"
    ):
        hash_changed(column, change)


def test_empty_arrays_need_no_buffers():
    for column in (TEXTS[:0], VIEWS[:0], pa.array([], pa.int8())):
        assert len(hash_changed(column, set_to("buffers", None))) == 0
    assert len(hash_changed(pa.array(["", ""]), without_buffer(2))) == 2


NUMBERS = [0, 1, -1, 3, 8, 12, 13, 64, 2**16, 2**31 - 1, -(2**31)]


def mutate(draw, stream):
    """Change some numbers in a stream's messages or buffers."""
    for _ in range(draw.choice([1, 1, 2, 4])):
        place = draw.randrange(len(stream) // 4) * 4
        number = int.from_bytes(stream[place : place + 4], "little", signed=True)
        number = draw.choice([*NUMBERS, number + 1, number - 1, number * 2])
        stream[place : place + 4] = (number % 2**32).to_bytes(4, "little")


def test_structured_faults():
    """A column is hashed if pyarrow's full validation accepts it; otherwise an error is raised."""
    words = [b"", b"a", b"bcd", LONG, b"x" * 12, b"y" * 13, LONG * 4]
    columns = [pa.array(words, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())]
    columns += [pa.array([b"abc", b"def"], pa.binary(3)), pa.array([3, -4], pa.int16())]
    columns += [pa.array(words).dictionary_encode(), pa.array([LONG, None, b"a", None])]
    refused = hashed = 0
    for case in range(CASES):
        draw = random.Random(case)
        try:
            column = ipc(draw.choice(columns), lambda stream: mutate(draw, stream))  # noqa: B023
        except (pa.ArrowException, OSError, UnicodeDecodeError, KeyError):
            continue
        try:
            column.validate(full=True)
            fault = ""
        except pa.ArrowException as error:
            fault = str(error)
        try:
            codes = xxh64(column).tolist()
        except ValueError:
            refused += 1
            assert fault, case
        except TypeError:  # the change has made a column of another type
            continue
        else:
            hashed += 1
            if not fault:
                assert codes == [oracle(value) for value in column.to_pylist()]
            else:  # the fault is in a part that hashing does not read
                assert column.null_count or re.search("padding|prefix|null_count", fault), fault
    assert refused > CASES * 0.05
    assert hashed > CASES * 0.05
