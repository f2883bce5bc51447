"""Texts hashed several at a time get the right codes, with and without vector instructions."""

import itertools
import random
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from xxh64_oracle import oracle

from sparsekit import _pybind
from sparsekit.hashing import xxh64

# Texts that Python stores as ASCII, or with one, two or four bytes per character.
ALPHABETS = ["abcxyz", "ab\x80é\xff", "aé\u07ff\u0800日\uffff", "a\U00010000😀\U0010ffff"]
ENGINES = ["portable", "avx2", "avx512"]


@pytest.fixture(params=ENGINES, autouse=True)
def engine(request):
    """Run a test with every engine that the processor supports."""
    if _pybind.use_xxh64_engine(request.param) != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    _pybind.use_xxh64_engine("avx512")


def check(values, seed=0):
    """Check the codes of values in a list and in each kind of column that can hold the values."""
    expected = [oracle(value, seed) for value in values]
    assert xxh64(values, seed).tolist() == expected
    if all(isinstance(value, (str, type(None))) for value in values):
        for kind in (pa.string(), pa.large_string(), pa.string_view()):
            assert xxh64(pa.array(values, kind), seed).tolist() == expected
    if values and all(isinstance(value, str) and value[-1:] != "\0" for value in values):
        assert xxh64(np.array(values), seed).tolist() == expected
        encoded = np.array([value.encode() for value in values])
        assert xxh64(encoded, seed).tolist() == expected


@pytest.mark.parametrize("seed", [0, 2**63 + 12345])
@pytest.mark.parametrize("alphabet", ALPHABETS, ids=["ascii", "latin-1", "ucs2", "ucs4"])
def test_every_length(alphabet, seed):
    draw = random.Random(1)
    texts = ["".join(draw.choices(alphabet, k=length)) for length in range(201)]
    check(texts, seed)
    check(texts[::-1], seed)


@pytest.mark.parametrize("length", range(70))
def test_texts_of_one_length(length):
    texts = [(f"{i:x}" * length)[:length] for i in range(40)]
    check(texts)
    check([*texts, "another"])


def test_every_number_of_texts():
    draw = random.Random(2)
    texts = ["x" * draw.randrange(80) + str(i) for i in range(600)]
    for count in itertools.chain(range(70), range(250, 262), range(505, 520), [600]):
        assert xxh64(texts[:count]).tolist() == [oracle(text) for text in texts[:count]]


def test_values_of_every_kind_in_one_batch():
    draw = random.Random(3)
    kinds = [
        lambda: None,
        lambda: draw.randrange(-(10 ** draw.randrange(1, 18)), 10 ** draw.randrange(1, 18)),
        lambda: draw.choice([2**63 - 1, -(2**63), 0, -1]),
        lambda: draw.randbytes(draw.randrange(100)),
        *(
            lambda alphabet=alphabet: "".join(draw.choices(alphabet, k=draw.randrange(100)))
            for alphabet in ALPHABETS
        ),
    ]
    check([draw.choice(kinds)() for _ in range(3000)])
    # The threads skip each of these items and all items after it: long ints, numbers of foreign
    # types, long texts.
    left_out = [10**30, np.int64(-5), "é" * 5000, "日" * 5000]
    for item in left_out:
        values = [draw.choice(kinds)() for _ in range(700)]
        values[draw.randrange(700)] = item
        check(values)


def test_texts_that_fill_all_room():
    """Non-ASCII texts may fill the buffer that holds their UTF-8 until they are hashed."""
    check(["é" * 31 + "a"] * 600)
    check(["😀" * 15 + "é" + "a"] * 600)
    check([text for _ in range(300) for text in ("é" * 31, "日" * 4096, "é" * 32)])
    # More texts than the buffer holds: no text may be overwritten before it is hashed.
    check([f"{i}" + "é" * (i % 29) for i in range(3000)])


# This is a separate program, because a read out of bounds ends the process. One program tests all
# engines, because importing torch takes most of the time.
AT_THE_EDGES = """
import ctypes, itertools, mmap, sys
import numpy as np, pyarrow as pa
from sparsekit import _pybind
from sparsekit.hashing import xxh64

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 3 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
memory[page : 2 * page] = bytes(range(1, 129)) * (page // 128)
inside = bytes(memory[page : 2 * page])
mprotect = ctypes.CDLL(None, use_errno=True).mprotect
for guard in (start, start + 2 * page):
    assert mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), 0) == 0


def check(begin, sizes):
    ends = begin + np.cumsum([0, *sizes])
    address = start + page + begin
    data = pa.foreign_buffer(address, int(ends[-1]) - begin, memory)
    offsets = pa.py_buffer((ends - begin).astype(np.int32))
    column = pa.Array.from_buffers(pa.binary(), len(sizes), [None, offsets, data])
    copies = [inside[a:b] for a, b in itertools.pairwise(ends)]
    assert xxh64(column).equal(xxh64(pa.array(copies, pa.binary())))


for engine in sys.argv[1:]:
    assert _pybind.use_xxh64_engine(engine) == engine
    for size in range(100):
        check(page - size, [size])
        check(0, [size])
        check(page - 9 * size, [size] * 9)
        check(0, [size] * 9)
        check(page - size - 40, [40, size])
        check(0, [size, 40])
        for shift in range(8):
            check(page - 40 * 8 - size - shift, [shift, *[8] * 40, size])
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect of Linux")
@pytest.mark.parametrize("engine", ["all"], indirect=False)
def test_no_byte_beyond_a_buffer_is_read(engine):
    there = [name for name in ENGINES if _pybind.use_xxh64_engine(name) == name]
    _pybind.use_xxh64_engine("avx512")
    run = subprocess.run(
        [sys.executable, "-c", AT_THE_EDGES, *there], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout.strip()) == (0, "done"), run.stderr
