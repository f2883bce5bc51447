"""The NumPy reader follows logs whose files are laid out as sparsekit/serving/format.py says."""

import zlib

import numpy as np
import pytest

from sparsekit.serving import SnapshotWriter
from sparsekit.serving.format import (
    DELTA_HEADER,
    DELTA_MAGIC,
    DELTA_SECTION,
    TOMBSTONE,
    UPSERT,
    base_name,
    base_version,
    delta_name,
    delta_part,
)

from . import numpy_reader


def summed(record):
    """Fill in the checksum that ends a record."""
    content = bytearray(record.tobytes())
    content[-4:] = np.uint32(zlib.crc32(content[:-4])).tobytes()
    return bytes(content)


def write_delta(folder, version, rank, ranks, sections, log_id=7):
    """Write a delta; a section is a kind, the number of a table, keys and vectors."""
    parts = []
    for kind, table, keys, vectors in sections:
        keys = np.array(keys, np.int64)
        rows = b"" if vectors is None else np.array(vectors, np.float32).tobytes()
        body = keys.tobytes() + rows
        body += bytes(-len(body) % 8)
        section = np.zeros((), DELTA_SECTION)
        section["table"], section["kind"], section["num_keys"] = table, kind, len(keys)
        section["row_bytes"], section["data_crc"] = (12, 4)[table], zlib.crc32(body)
        parts += [summed(section), body]
    header = np.zeros((), DELTA_HEADER)
    header["magic"], header["format_version"], header["log_id"] = DELTA_MAGIC, 1, log_id
    header["num_sections"], header["version"] = len(sections), version
    header["rank"], header["num_ranks"] = rank, ranks
    header["file_bytes"] = header.nbytes + sum(map(len, parts))
    path = folder / delta_name(version, rank, ranks)
    path.write_bytes(summed(header) + b"".join(parts))
    return path


@pytest.fixture
def log(tmp_path):
    for version in (2, 10):
        with SnapshotWriter(tmp_path / base_name(version), log_id=7, version=version) as snapshot:
            wide, narrow = snapshot.table("wide", 3), snapshot.table("narrow", 1)
            wide.append([1, 2, 3], np.full((3, 3), version, np.float32))
            narrow.append([-1], [[5.0]])
    return tmp_path


def test_deltas_are_applied_in_order(log):
    assert numpy_reader.follow(log).version == 10
    write_delta(log, 11, 0, 2, [(UPSERT, 0, [3, 4], np.ones((2, 3))), (TOMBSTONE, 0, [2], None)])
    assert numpy_reader.follow(log).version == 10  # a part is missing
    # A tombstone of one part comes before an upsert of the other.
    write_delta(log, 11, 1, 2, [(TOMBSTONE, 0, [3, 77], None), (UPSERT, 1, [9], [[8.0]])])
    write_delta(log, 12, 0, 1, [(UPSERT, 0, [2], np.full((1, 3), 6.0)), (UPSERT, 1, [], None)])
    write_delta(log, 14, 0, 1, [])
    found = numpy_reader.follow(log)
    assert found.version == 12
    wide, narrow = found.list
    vectors = [None if wide.find(key) is None else wide.vector(key)[0] for key in (1, 2, 3, 4, 77)]
    assert vectors == [10, 6, 1, 1, None]
    assert [narrow.vector(key)[0] for key in (-1, 9, 10)] == [5, 8, 0]


@pytest.mark.parametrize("damage", ["bit", "cut", "log", "version"])
def test_damaged_deltas_are_refused(log, damage):
    sections = [(UPSERT, 0, [3, 4], np.ones((2, 3)))]
    if damage == "log":
        write_delta(log, 11, 0, 1, sections, log_id=8)
    elif damage == "version":
        path = write_delta(log, 12, 0, 1, sections)
        path.rename(log / delta_name(11, 0, 1))
    else:
        path = write_delta(log, 11, 0, 1, sections)
        content = bytearray(path.read_bytes())
        if damage == "bit":
            content[170] ^= 1
        path.write_bytes(content if damage == "bit" else content[:-8])
    with pytest.raises(ValueError, match=r"is damaged|is no delta of this log"):
        numpy_reader.follow(log)


def test_names_of_files():
    assert base_name(12) == "base-00000000000000000012.sks"
    assert delta_name(2**64 - 1, 3, 16) == "delta-18446744073709551615-00003-of-00016.skd"
    assert base_version(base_name(12)) == 12
    assert delta_part(delta_name(7, 3, 16)) == (7, 3, 16)
    for name in ("base-12.sks", ".base-00000000000000000012.sks", "base-00000000000000000012.sks~"):
        assert base_version(name) is None
        assert delta_part(name.replace("base", "delta")) is None
