"""Structural faults in Parquet files raise documented errors and take little memory.

Numbers, names, lists and types in footers and page headers change, while the rest of the file stays
intact; flipped bytes rarely have this effect. SPARSEKIT_FUZZ_FILES=10000 tries that many files
instead of 60.
"""

import datetime
import decimal
import os
import random

import pytest
from peak_memory import forget_peak, peak

from sparsekit.data import ParquetReader
from sparsekit.errors import DataFormatError

from . import thrift
from .test_fuzz_readers import outcome

pa = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

CASES = int(os.environ.get("SPARSEKIT_FUZZ_FILES", "60"))
NUMBERS = [0, 1, -1, 7, 127, 2**15, 2**31 - 1, 2**31, -(2**31), 2**40, 2**62, 2**63 - 1, -(2**63)]
TEXTS = [b"", b"price", b"\xff\xfe", b"a.b", b"x" * 3000, b"\0"]


def wholes(path):
    """Write files with a few layouts; return the files' contents."""
    day = datetime.date(2024, 1, 31)
    columns = {
        "click": [0.0, 1.0, None, 1.0] * 5,
        "price": [1.5, None, 2.0, float("inf")] * 5,
        "user": ["a", "bb", None, ""] * 5,
        "tags": [[1, 2], [], None, [None, 3]] * 5,
        "nothing": pa.nulls(20),
        "day": [day, None, day, day] * 5,
        "cost": [decimal.Decimal("1.50"), None, decimal.Decimal(2), None] * 5,
    }
    for settings in (
        {},
        {"compression": "gzip", "data_page_version": "2.0"},
        {"compression": "none", "use_dictionary": False},
        {"compression": "zstd", "store_schema": False, "write_page_index": True},
    ):
        parquet.write_table(pa.table(columns), path, row_group_size=7, **settings)
        yield path.read_bytes()


def footer_of(content):
    """Return the footer and the offset at which it begins."""
    begin = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    return thrift.read_struct(content, begin)[0], begin


def with_footer(content, footer):
    written = thrift.write_struct(footer)
    return content + written + len(written).to_bytes(4, "little") + b"PAR1"


def nodes(kind, value, found):
    """Append all structs and lists inside a value to `found`, and return `found`."""
    if kind == thrift.STRUCT:
        found.append((kind, value))
        for _, inner, each in value:
            nodes(inner, each, found)
    elif kind in (thrift.LIST, thrift.SET):
        found.append((kind, value))
        for each in value[1]:
            nodes(value[0], each, found)
    return found


def changed(draw, kind, value):
    """Return another value of the same Thrift type, or the same value for some types."""
    if kind in thrift.INTEGERS:
        other = draw.choice([*NUMBERS, value + 1, value - 1, -value, value * 1000])
        return (other + 2**63) % 2**64 - 2**63
    if kind == thrift.BINARY:
        return draw.choice([*TEXTS, value[:-1], value + b"x", value * 2])
    return not value if kind in (thrift.TRUE, thrift.FALSE) else value


def mutate(draw, struct):
    """Make one random change inside a struct."""
    kind, node = draw.choice(nodes(thrift.STRUCT, struct, []))
    if kind == thrift.STRUCT and node:
        place = draw.randrange(len(node))
        action = draw.randrange(10)
        if action == 0:
            del node[place]
        elif action == 1:
            node[place][0] += draw.choice([1, 2, 100])
            node.sort(key=lambda field: field[0])
        elif action == 2:
            node.insert(place, list(draw.choice(node)))
        else:
            node[place][2] = changed(draw, *node[place][1:])
    elif kind != thrift.STRUCT and node[1]:
        place = draw.randrange(len(node[1]))
        action = draw.randrange(4)
        if action == 0:
            del node[1][place]
        elif action == 1:
            node[1].insert(place, draw.choice(node[1]))
        elif action == 2:
            node[1] *= draw.choice([2, 100])
        else:
            node[1][place] = changed(draw, node[0], node[1][place])


def field(struct, number):
    return next((each for each in struct if each[0] == number), None)


def mutate_page(draw, content):
    """Return a copy with a changed page header and a footer adapted to the header's size."""
    footer, end = footer_of(content)
    chunks = [
        chunk
        for group in field(footer, 4)[2][1]
        for chunk in field(group, 1)[2][1]
        if field(chunk, 3) is not None
    ]
    about = field(draw.choice(chunks), 3)[2]
    begin = draw.choice([each[2] for each in (field(about, 9), field(about, 11)) if each])
    header, after = thrift.read_struct(content, begin)
    mutate(draw, header)
    written = thrift.write_struct(header)
    longer = len(written) - (after - begin)
    field(about, 7)[2] += longer
    for chunk in chunks:
        for number in (9, 11):
            place = field(field(chunk, 3)[2], number)
            if place is not None and place[2] > begin:
                place[2] += longer
    return with_footer(content[:begin] + written + content[after:end], footer)


def mutated(draw, content):
    """Return a copy with faults in the footer, in the header of a page, or in both places."""
    if draw.random() < 0.5:
        content = mutate_page(draw, content)
    footer, end = footer_of(content)
    for _ in range(draw.choice([0, 1, 2, 4, 8])):
        mutate(draw, footer)
    content = with_footer(content[:end], footer)
    if draw.random() < 0.1:  # cut the footer short, or claim another length
        place = draw.randrange(end, len(content))
        content = content[:place] + draw.choice(
            [content[-8:], b"\xfc\xff\xff\x3f" + content[place:]]
        )
    return content


def test_structured_faults(tmp_path):
    path, parsed, faulty = tmp_path / "x.parquet", 0, 0
    files = list(wholes(path))
    sparse = {"user": "hash", "tags": "int", "day": "int", "cost": "hash", "nothing": "hash"}
    settings = {"sparse": sparse, "dense": ["price"], "label": "click", "on_error": "skip"}
    for case in range(CASES):
        draw = random.Random(case)
        path.write_bytes(mutated(draw, draw.choice(files)))
        shuffle = draw.random() < 0.5
        before = forget_peak()
        kind, _ = outcome(lambda: ParquetReader(path, 6, shuffle=shuffle, **settings))  # noqa: B023
        # This leaves room for libraries loaded by the first file and for Arrow's threads and pools;
        # the files have 5 KB.
        assert peak() - before < 48 << 20, case
        parsed += isinstance(kind, int)
        faulty += kind is DataFormatError
    assert parsed > CASES * 0.1
    assert faulty > CASES * 0.3


def test_no_memory_for_what_a_footer_only_claims(tmp_path):
    """A tiny file whose footer claims a million columns takes no memory for the columns."""
    footer = b"\x15\x02\x19\xfc\xbf\x84\x3d" + bytes(100)
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1")
    before = forget_peak()
    with pytest.raises(DataFormatError, match=r"x\.parquet: .*limit"):
        ParquetReader(path, 6, label="a")
    assert peak() - before < 48 << 20
