"""Readers parse mutated files or raise the documented errors.

SPARSEKIT_FUZZ_FILES=10000 tries that many files instead of 500; `make sanitize` tries 2,000 under
AddressSanitizer.
"""

import bz2
import functools
import gzip
import json
import lzma
import os
import random
import tracemalloc

import pytest
import torch

from sparsekit.data import CriteoReader, CsvReader, Keys, ParquetReader
from sparsekit.datasets import read_adult, read_ratings
from sparsekit.datasets.reviews import read_reviews
from sparsekit.errors import DataFormatError

from .criteo import random_lines

CASES = int(os.environ.get("SPARSEKIT_FUZZ_FILES", "500"))
PIECES = [b"\n", b"\r\n", b"\r", b"\0", b'"', b'""', b",", b"\t", b"-", b"+", b".", b"e", b"|"]
PIECES += [b'"a\nb"', b',"', b'",', b"::", b"{", b"}", b"null", b"1" * 400]
PIECES += [b" ", b"\xff", b"\xef\xbb\xbf", b"1e400", b"nan", b"9" * 30, b"f" * 17, b"x" * 300]


def mutate(draw, content):
    """Return a copy of the content with a few faults."""
    content = bytearray(content)
    for _ in range(draw.randrange(6)):
        place = draw.randrange(len(content) + 1)
        action = draw.randrange(4)
        if action == 0:
            content[place:place] = draw.choice(PIECES)
        elif action == 1:
            del content[place : place + draw.randrange(1, 30)]
        elif action == 2 and place < len(content):
            content[place] = draw.randrange(256)
        elif draw.random() < 0.2:
            del content[place:]
    return bytes(content)


def outcome(make):
    """Read all rows; return (skipped rows, columns), or the error's type and message."""
    try:
        reader = make()
        batches = list(reader)
    except (DataFormatError, ValueError) as error:
        return type(error), str(error)
    parts = [(batch.label, batch.dense, *batch.sparse.to_dict().values()) for batch in batches]
    rows = sum(batch.rows for batch in batches)
    assert rows + reader.skipped == reader.count_rows()
    for batch in batches:
        assert batch.dense.isfinite().all()
        offsets = batch.sparse.offsets()
        assert offsets[0] == 0
        assert offsets.diff().ge(0).all()
        assert offsets[-1] == len(batch.sparse.values())
    return reader.skipped, parts


def same(one, other):
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def kinds(draw, path):
    """Return a file's text and a function that reads it: three columns, or Criteo's format."""
    settings = {
        "on_error": draw.choice(["raise", "skip"]),
        "max_line_bytes": draw.choice([200, 1000, 1 << 20]),
    }
    if draw.random() < 0.5:
        text = "\n".join(random_lines(4, draw.random())) + "\n"
        keys = Keys(draw.choice(["hex", "hash"]), draw.choice([None, ","]))
        return text, lambda **more: CriteoReader(path, 3, keys=keys, **settings, **more)
    sparse = {
        "user": Keys(draw.choice(["int", "hash"]), missing=draw.choice([None, 5])),
        "tags": Keys("hash", separator="|"),
    }
    text = (
        'user,tags,price,click\n12,"a|b",0.5,1\n-7,"\n3,c,4,1\n",1e3,0\n,"x""y|",,1\n99,é|é,-2,0\n'
    )
    return text, lambda **more: CsvReader(
        path, 3, sparse=sparse, dense=["price"], label="click", **settings, **more
    )


# Several processes share the files. PARTS is odd: every fourth file is read by ranks, too.
PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
def test_text(tmp_path, part):
    path, parsed = tmp_path / "x", 0
    cases = range(part, CASES, PARTS)
    for case in cases:
        draw = random.Random(case)
        text, make = kinds(draw, path)
        content = mutate(draw, text.encode())
        path.write_bytes(content)
        whole = outcome(make)
        parsed += whole[0] == 0
        # The block size makes no difference.
        for block_bytes in (draw.randrange(1, 40), draw.randrange(40, 400)):
            assert same(outcome(lambda: make(block_bytes=block_bytes)), whole), (case, block_bytes)  # noqa: B023
        # Text that begins with gzip's magic number would raise a different error.
        if content[:2] != b"\x1f\x8b":
            path.write_bytes(gzip.compress(content, 1))
            assert same(outcome(lambda: make(block_bytes=block_bytes)), whole), case  # noqa: B023
        if case % 4 == 0 and isinstance(whole[0], int):  # ranks share the rows
            shares = [make(rank=rank, world_size=2, block_bytes=30) for rank in (0, 1)]
            batches = [batch for share in shares for batch in share]
            assert sum(share.skipped for share in shares) == whole[0], case
            for place in (0, 1):  # labels and numbers
                expected = [part[place] for part in whole[1]]
                found = [batch[place] for batch in batches]
                assert torch.equal(torch.cat([*found]), torch.cat([*expected, found[0][:0]])), case
    assert 0.1 < parsed / len(cases) < 0.9  # enough files parse and enough do not


ADULT_ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, "
)
ADULT_ROW += "Male, 2174, 0, 40, United-States, <=50K\n"
REVIEW = {
    "reviewerID": "A1",
    "asin": "007",
    "overall": 4.0,
    "reviewText": "good\n",
    "unixReviewTime": 9,
}
SETS = {
    "tabs": (read_ratings, "user_id\titem_id\trating\ttimestamp\n" + '1\t"a\tb"\t3.5\t9\n' * 4),
    "colons": (read_ratings, '1::"a::b"::3::9\n' * 4),
    "commas": (read_ratings, "userId,movieId,rating,timestamp\n" + '1,"a\nb",4.0,9\n' * 2),
    "people": (read_adult, "|1x3 Cross validator\n" + ADULT_ROW * 3),
    "reviews": (
        read_reviews,
        json.dumps(REVIEW) + "\n" + json.dumps({**REVIEW, "reviewText": None}),
    ),
}


PACKS = [gzip.compress, bz2.compress, functools.partial(lzma.compress, preset=0)]


@pytest.mark.parametrize("kind", SETS)
def test_data_sets(tmp_path, kind):
    """Loading a data set raises a documented error, or gives as many rows as a compressed copy."""
    read, text = SETS[kind]
    path, parsed = tmp_path / "x", 0
    cases = CASES // 20
    tracemalloc.start()
    for case in range(cases):
        draw = random.Random(case)
        content = mutate(draw, text.encode())
        found = []
        for pack in (bytes, draw.choice(PACKS)):
            # In every second case the compressed file has faults, too.
            packed = (
                mutate(draw, pack(content)) if case % 2 and pack is not bytes else pack(content)
            )
            path.write_bytes(packed)
            try:
                found.append(len(read(path)))
            except DataFormatError as error:
                found.append(str(error))
        if case % 2 == 0 and content[:2] not in (b"\x1f\x8b", b"BZ"):
            assert found[0] == found[1], case
        parsed += isinstance(found[0], int)
        assert all(isinstance(each, int) or str(path) in each for each in found)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 20 << 20  # compression takes up to 8 MiB
    assert cases * 0.1 < parsed < cases * 0.95


def test_gzip(tmp_path):
    path, refused = tmp_path / "x.gz", 0
    whole = gzip.compress("\n".join(random_lines(20)).encode())
    for case in range(CASES // 5):
        path.write_bytes(mutate(random.Random(case), whole))
        refused += outcome(lambda: CriteoReader(path, 7, block_bytes=500))[0] in (
            DataFormatError,
            ValueError,
        )
    assert refused > CASES // 10


def test_parquet(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path, parsed = tmp_path / "x.parquet", 0
    columns = {
        "click": [0.0, 1.0, None, 1.0] * 5,
        "price": [1.5, None, 2.0, float("inf")] * 5,
        "user": ["a", "bb", None, ""] * 5,
        "tags": [[1, 2], [], None, [None, 3]] * 5,
    }
    wholes = []
    for settings in ({}, {"compression": "gzip"}, {"compression": "none", "use_dictionary": False}):
        parquet.write_table(pa.table(columns), path, row_group_size=7, **settings)
        wholes.append(path.read_bytes())
    # Random bytes rarely change a file's structure; tests/data/test_fuzz_parquet.py does.
    cases = CASES // 20
    for case in range(cases):
        draw = random.Random(case)
        path.write_bytes(mutate(draw, draw.choice(wholes)))
        kind, _ = outcome(
            lambda: ParquetReader(
                path,
                6,
                sparse={"user": "hash", "tags": "int"},
                dense=["price"],
                label="click",
                on_error="skip",
            )
        )
        parsed += isinstance(kind, int)
    assert cases * 0.1 < parsed < cases * 0.9
