"""Damaged and hostile files are refused with their name, and harm no one who reads them."""

import subprocess
import sys

import numpy as np
import pytest

from sparsekit.serving import Snapshot, SnapshotError, UnknownKeyError

from . import made
from .test_lookup import bags_of, table_of

TABLES = 5


def file_of(rng):
    """Return a snapshot of a table in each format, and the tables."""
    misses = ("initial", "zeros", "fallback", "error", "initial")
    tables = [
        table_of(rng, 5 + t, n=60, name=f"table {t}", row_format=row_format, miss=misses[t])
        for t, row_format in enumerate(made.FORMATS)
    ]
    return made.snapshot(tables), tables


def directory_end(file):
    return made.PAGE + int(np.frombuffer(file, made.HEADER, 1)["directory_bytes"][0])


def damaged(file, rng, begin, end):
    """Return a file with up to 8 other bytes in a part, at least one of which differs."""
    out = bytearray(file)
    while bytes(out) == file:
        for at in rng.integers(begin, end, rng.integers(1, 9)):
            out[at] = rng.integers(256)
    return bytes(out)


def refuses(path, **options):
    with pytest.raises(SnapshotError) as raised:
        Snapshot(path, **options).close()
    assert path.name in str(raised.value)


def look_up_all(snapshot, tables, rng):
    """Look up in a file whose data may be damaged: any result will do."""
    with np.errstate(all="ignore"):
        for table in tables:
            keys, offsets, _ = bags_of(rng, table, (0, 3, 300, 40), 0.2)
            for combiner in ("sum", "max", "none"):
                try:
                    snapshot.lookup(table.name, keys, offsets, combiner=combiner)
                except UnknownKeyError:
                    assert table.miss == "error"


@pytest.mark.parametrize("part", range(6))
def test_300_corruptions(tmp_path, part):
    rng = np.random.default_rng(part)
    file, tables = file_of(np.random.default_rng(0))
    path, end = tmp_path / "damaged.sks", directory_end(file)
    for number in range(50):
        kind = number % 4
        if kind == 0:
            path.write_bytes(damaged(file, rng, 0, end))
            refuses(path)
        elif kind == 1:
            path.write_bytes(file[: rng.integers(len(file))])
            refuses(path)
        else:
            path.write_bytes(damaged(file, rng, end, len(file)))
            refuses(path, verify=True)
            with Snapshot(path) as snapshot:
                look_up_all(snapshot, tables, rng)


def test_every_byte_of_header_and_directory_counts(tmp_path):
    file, _ = file_of(np.random.default_rng(0))
    path = tmp_path / "damaged.sks"
    for at in [*range(0, 100), *range(4080, directory_end(file), 7)]:
        out = bytearray(file)
        out[at] ^= 1 << at % 8
        path.write_bytes(bytes(out))
        refuses(path)


@pytest.mark.parametrize("part", range(4))
def test_rows_and_buckets_of_random_bytes(tmp_path, part):
    """Nothing but the header makes sense, and its checksums are right."""
    rng = np.random.default_rng(part)
    file, tables = file_of(rng)
    begin = -(-directory_end(file) // made.PAGE) * made.PAGE
    path = tmp_path / "damaged.sks"
    for _ in range(5):
        noise = rng.integers(0, 256, len(file) - begin, np.uint8)
        noise[rng.random(len(noise)) < 0.5] = 0
        path.write_bytes(file[:begin] + noise.tobytes())
        refuses(path, verify=True)
        with Snapshot(path) as snapshot:
            look_up_all(snapshot, tables, rng)


def test_buckets_that_all_send_a_search_on(tmp_path):
    """A search ends after it has seen all buckets."""
    file, tables = file_of(np.random.default_rng(0))
    out = bytearray(file)
    record = np.frombuffer(out, made.RECORD, 1, made.PAGE)[0]
    at, n = int(record["index_offset"]), int(record["num_buckets"])
    np.frombuffer(out, made.BUCKET, n, at)["spilled"] = 2**31 - 1
    path = tmp_path / "damaged.sks"
    path.write_bytes(bytes(out))
    with Snapshot(path) as snapshot:
        look_up_all(snapshot, tables, np.random.default_rng(0))


BIG = 2**64 - 1
HOSTILE = [
    *[(None, {"num_tables": n}) for n in (2**16, 2**16 + 1, 2**32 - 1)],
    *[(None, {"directory_bytes": n}) for n in (0, 255, 2**40, BIG, BIG - 4095)],
    *[(None, {"file_bytes": n}) for n in (0, BIG)],
    (None, {"note_bytes": BIG}),
    (None, {"note_offset": BIG, "note_bytes": 1}),
    (None, {"note_offset": 0, "note_bytes": 1}),
    (None, {"format_version": 0}),
    *[(0, {"name_offset": n}) for n in (0, made.PAGE, BIG)],
    *[(0, {"name_bytes": n}) for n in (4097, 2**32 - 1)],
    (1, {"name_offset": "of table 0"}),
    (1, {"row_format": 5}),
    *[(1, {"dim": n}) for n in (0, 5, 2**20 + 1, 2**32 - 1)],
    *[(1, {"row_bytes": n}) for n in (0, 1, 13, 2**32 - 1)],
    *[(1, {"num_rows": n}) for n in (2**31, 2**31 - 1, 10000, 2**63, BIG)],
    *[(1, {"num_buckets": n}) for n in (0, 11, 2**40, 2**58, 2**62, BIG)],
    *[(1, {"index_offset": n}) for n in (0, made.PAGE, 1, 2**40, BIG - 4095, BIG)],
    *[(1, {"rows_offset": n}) for n in (0, made.PAGE, 1, 2**40, BIG - 4095, BIG)],
    *[(1, {"rows_offset": place}) for place in ("index of table 0", "rows of table 0", "inside")],
    (1, {"index_offset": "rows of table 0"}),
    (1, {"miss": 4}),
    (1, {"miss": 2, "num_fallbacks": 0}),
    (1, {"num_fallbacks": 2**31}),
    (1, {"distribution": 3}),
    (1, {"combiner": 5}),
    (1, {"has_padding_key": 2}),
]


def hostile(file, number, fields):
    records = np.frombuffer(file, made.RECORD, TABLES, made.PAGE)
    places = {
        "of table 0": records["name_offset"][0],
        "index of table 0": records["index_offset"][0],
        "rows of table 0": records["rows_offset"][0],
        "inside": records["rows_offset"][1] + 64,  # of a page that has no other section
    }
    return made.changed(file, number, **{k: places.get(v, v) for k, v in fields.items()})


@pytest.mark.parametrize(("number", "fields"), HOSTILE, ids=lambda v: str(v).replace(" ", ""))
def test_hostile_numbers(tmp_path, number, fields):
    """Checksums are right here, but numbers are not."""
    file, _ = file_of(np.random.default_rng(0))
    path = tmp_path / "hostile.sks"
    path.write_bytes(file)
    Snapshot(path, verify=True).close()
    path.write_bytes(hostile(file, number, fields))
    refuses(path)


LIMITED = """
import resource, sys
from sparsekit.serving import Snapshot, SnapshotError
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * resource.getpagesize() + (32 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sys.argv[1:]:
    try:
        Snapshot(path, copy=True)
    except SnapshotError:
        continue
    sys.exit(f"{path} was opened")
"""


def test_hostile_numbers_allocate_nothing(tmp_path):
    """With addresses for 32 MiB more, none of them leads to a lack of memory."""
    file, _ = file_of(np.random.default_rng(0))
    paths = []
    for number, (table, fields) in enumerate(HOSTILE):
        paths.append(tmp_path / f"{number}.sks")
        paths[-1].write_bytes(hostile(file, table, fields))
    done = subprocess.run([sys.executable, "-c", LIMITED, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_newer_format_says_so(tmp_path):
    file, _ = file_of(np.random.default_rng(0))
    path = tmp_path / "newer.sks"
    path.write_bytes(made.changed(file, format_version=2))
    with pytest.raises(SnapshotError, match=r"newer\.sks: format 2; .* formats up to 1"):
        Snapshot(path)


@pytest.mark.parametrize(
    "name",
    [b"\xff", b"\xc0\x80", b"a\0b", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80", b"\xc3"],
)
def test_names_that_are_not_utf8(tmp_path, name):
    file, _ = file_of(np.random.default_rng(0))
    out = bytearray(file)
    record = np.frombuffer(out, made.RECORD, 1, made.PAGE)[0]
    at = int(record["name_offset"])
    out[at : at + len(name)] = name
    path = tmp_path / "named.sks"
    path.write_bytes(made.changed(bytes(out), 0, name_bytes=len(name)))
    with pytest.raises(SnapshotError, match=r"named\.sks: table 0 has no valid name"):
        Snapshot(path)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("rows", -1, "has a gap"),
        ("keys", "other", "has a key that a search does not find"),
        ("rows", 2**31 - 1, "has a row beyond the table"),
        ("rows", "other", "has a row that another key has, too"),
        ("spilled", -1, "has a negative count"),
    ],
)
def test_an_index_that_is_wrong_although_its_checksum_is_right(tmp_path, field, value, message):
    file, _ = file_of(np.random.default_rng(0))
    out = bytearray(file)
    record = np.frombuffer(out, made.RECORD, 1, made.PAGE)[0]
    at, n = int(record["index_offset"]), int(record["num_buckets"])
    buckets = np.frombuffer(out, made.BUCKET, n, at)
    full = int(np.argmax(buckets["rows"][:, 1]))
    if value == "other":  # in this bucket a row, in another one a key
        another = (full + n // 2) % n
        value = buckets["rows"][full, 1] if field == "rows" else buckets["keys"][another, 0]
    if field == "spilled":
        buckets["spilled"][full] = value
    else:
        buckets[field][full, 0] = value
    path = tmp_path / "index.sks"
    crc = made.crc_of(buckets.tobytes())
    path.write_bytes(made.changed(bytes(out), 0, index_crc=crc))
    Snapshot(path).close()
    with pytest.raises(SnapshotError, match=f'index.sks: table "table 0": bucket .* {message}'):
        Snapshot(path, verify=True)


def test_files_that_are_something_else(tmp_path):
    path = tmp_path / "other.sks"
    for content in (b"", b"short", bytes(4096), b"PK\3\4" + bytes(10000)):
        path.write_bytes(content)
        refuses(path)


def test_a_limit_of_addresses_is_no_obstacle(tmp_path):
    """The addresses that are reserved for rows to come give way to a limit (ulimit -v)."""
    file, _ = file_of(np.random.default_rng(0))
    path = tmp_path / "model.sks"
    path.write_bytes(file)
    code = LIMITED.replace("Snapshot(path, copy=True)", "Snapshot(path).close()")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True)
    assert done.stderr == f"{path} was opened\n"
