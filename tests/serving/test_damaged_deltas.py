"""Damaged and hostile deltas are refused, by name, and the version before goes on being served."""

import ctypes
import os
import re
import resource

import numpy as np
import pytest

from sparsekit.serving import BusyError, Snapshot, SnapshotError, _library
from sparsekit.serving.delta_file import LogError, Section, read_delta
from sparsekit.serving.format import DELTA_HEADER, DELTA_SECTION, TOMBSTONE, UPSERT
from sparsekit.serving.log_folder import compact

from .logs import LOG_ID, Log
from .made import BUCKET, PAGE, RECORD, crc_of

HEAD, SECTION = DELTA_HEADER.itemsize, DELTA_SECTION.itemsize


def flip_bit(data, chance, other):
    data[chance.integers(len(data))] ^= 1 << chance.integers(8)
    return data


def cut(data, chance, other):
    return data[: chance.integers(len(data))]


def lengthen(data, chance, other):
    return data + bytes(chance.integers(1, 100))


def zero_a_range(data, chance, other):
    begin = chance.integers(len(data))
    end = min(len(data), begin + chance.integers(1, 200))
    if not any(data[begin:end]):
        return flip_bit(data, chance, other)
    data[begin:end] = bytes(end - begin)
    return data


def mix_in_another(data, chance, other):
    """Have the beginning of one delta and the end of another."""
    at = chance.integers(1, min(len(data), len(other)))
    return data[:at] + other[at:]


def another_version(data, chance, other):
    return other


def overwrite(data, chance, other):
    begin = chance.integers(len(data) - 8)
    data[begin : begin + 8] = chance.bytes(8)
    return data


DAMAGES = [flip_bit, cut, lengthen, zero_a_range, mix_in_another, another_version, overwrite]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused(tmp_path, damage):
    log = Log(tmp_path / "log", ranks=2)
    log.add()
    log.add()
    path = log.delta(2, 1)
    sound, other = path.read_bytes(), log.delta(1, 1).read_bytes()
    with Snapshot(log.path) as snapshot:
        for seed in range(24):  # 168 in all
            chance = np.random.default_rng(seed)
            damaged = bytes(damage(bytearray(sound), chance, bytearray(other)))
            assert damaged != sound
            path.write_bytes(damaged)
            with pytest.raises(SnapshotError, match=re.escape(str(path))):
                snapshot.refresh()
            log.assert_serves(snapshot, 1)
            with pytest.raises((LogError, SnapshotError), match=re.escape(str(path))):
                compact(log.path)
        path.write_bytes(sound)
        snapshot.refresh()
        log.assert_serves(snapshot, 2)


def signed(data, at=0, **fields):
    """Return a delta with other values in its header, or in the section at a place, signed."""
    data = bytearray(data)
    dtype = DELTA_SECTION if at else DELTA_HEADER
    record = np.frombuffer(data, dtype, 1, at)[0]
    for name, value in fields.items():
        record[name] = value
    field = "header_crc" if at else "crc"
    record[field] = crc_of(record.tobytes()[: dtype.fields[field][1]])
    return bytes(data)


HOSTILE = {
    "sections": (0, {"num_sections": 2**32 - 1}, "ends before section"),
    "no sections": (0, {"num_sections": 0}, "bytes behind the last section"),
    "newer": (0, {"format_version": 2}, "of format 2"),
    "bytes": (0, {"file_bytes": 2**63}, "bytes instead of 9223372036854775808"),
    "rank": (0, {"rank": 7}, "rank 7 of 1"),
    "no ranks": (0, {"num_ranks": 0}, "rank 0 of 0"),
    "version": (0, {"version": 5}, "holds version 5"),
    "log": (0, {"log_id": LOG_ID + 1}, "belongs to log"),
    "keys": (HEAD, {"num_keys": 2**64 - 1}, "has 18446744073709551615 keys"),
    "many keys": (HEAD, {"num_keys": 2**30}, "has 1073741824 keys"),
    "one key more": (HEAD, {"num_keys": 31}, "checksum|keys"),
    "row bytes": (HEAD, {"row_bytes": 2**32 - 1}, "4294967295 bytes"),
    "no row bytes": (HEAD, {"row_bytes": 0}, "0 bytes"),
    "format": (HEAD, {"row_format": 3}, "format 3"),
    "table": (HEAD, {"table": 2}, "of table 2"),
    "kind": (HEAD, {"kind": 3}, "unknown kind, 3"),
    "another kind": (HEAD, {"kind": TOMBSTONE}, "checksum"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_allocate_nothing(tmp_path, name):
    at, fields, message = HOSTILE[name]
    log = Log(tmp_path / "log")
    log.add()
    path = log.delta(1)
    path.write_bytes(signed(path.read_bytes(), at, **fields))
    with Snapshot(log.path) as snapshot:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(SnapshotError, match=message) as error:
            snapshot.refresh()
        assert str(path) in str(error.value)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KiB
        log.assert_serves(snapshot, 0)
    if name not in ("rank", "no ranks"):
        with pytest.raises(LogError, match=re.escape(str(path))):
            compact(log.path)


def test_a_sparse_file_of_any_size_is_refused(tmp_path):
    log = Log(tmp_path / "log")
    log.add()
    path = log.delta(1)
    path.write_bytes(signed(path.read_bytes(), 0, file_bytes=1 << 40))
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    with Snapshot(log.path) as snapshot, pytest.raises(SnapshotError, match="behind the last"):
        snapshot.refresh()
    path.unlink()


def test_a_folder_and_a_pipe_are_no_deltas(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        log.delta(1).mkdir()
        with pytest.raises((SnapshotError, OSError), match=log.delta(1).name):
            snapshot.refresh()
        log.delta(1).rmdir()
        os.mkfifo(log.delta(1))
        with pytest.raises(SnapshotError, match=f"{log.delta(1).name}: not a plain file"):
            snapshot.refresh()


def apply(snapshot, *paths):
    array = (ctypes.c_char_p * len(paths))(*(str(path).encode() for path in paths))
    progress = _library.Progress()
    library = _library.load()
    _library.check(library.sk_apply(snapshot.handle, array, len(paths), ctypes.byref(progress)))
    return progress.version


def test_files_are_applied_one_version_at_a_time(tmp_path):
    log = Log(tmp_path / "log", ranks=2)
    for _ in range(3):
        log.add()
    with Snapshot(log.base(0)) as snapshot:
        with pytest.raises(ValueError, match="one file of each rank, got 1"):
            apply(snapshot, log.delta(1, 0))
        with pytest.raises(ValueError, match="one file of each rank, got 2"):
            apply(snapshot, log.delta(1, 0), log.delta(1, 0))
        with pytest.raises(SnapshotError, match=r"version 2, .* needs version 1"):
            apply(snapshot, log.delta(2, 0), log.delta(2, 1))
        log.assert_serves(snapshot, 0)
        assert apply(snapshot, log.delta(1, 1), log.delta(1, 0)) == 1
        log.assert_serves(snapshot, 1)
        with pytest.raises(ValueError, match=r"version 1, .* needs version 2"):
            apply(snapshot, log.delta(1, 0), log.delta(1, 1))
        with pytest.raises(SnapshotError, match=r"version 3, .* needs version 2"):
            apply(snapshot, log.delta(2, 0), log.delta(3, 1))
        with snapshot.pin() as pinned:
            assert apply(snapshot, log.delta(2, 0), log.delta(2, 1)) == 2
            log.assert_serves(pinned, 1)
            with pytest.raises(BusyError):
                apply(snapshot, log.delta(3, 0), log.delta(3, 1))
        apply(snapshot, log.delta(3, 0), log.delta(3, 1))
        log.assert_serves(snapshot, 3)
        with pytest.raises(ValueError, match="num_paths is 0"):
            apply(snapshot)


def test_files_are_read_as_they_were_written(tmp_path):
    log = Log(tmp_path / "log")
    (written,) = log.add()
    header, sections = read_delta(log.delta(1))
    assert (header["version"], header["step"]) == (1, 3)
    assert len(sections) == len(written) == 4
    for section, expected in zip(sections, written, strict=True):
        assert isinstance(section, Section)
        np.testing.assert_array_equal(section.keys, expected.keys)
        np.testing.assert_array_equal(section.rows, expected.rows)
        kind = UPSERT if section.rows is not None else TOMBSTONE
        assert (section.table, kind) == (expected.table, UPSERT if expected.rows is not None else 2)


def test_a_row_that_ends_behind_the_pages_of_the_file(tmp_path):
    """A damaged index may have any row, also where a table has got no memory for rows to come."""
    log = Log(tmp_path / "log")
    path = log.base(0)
    file = bytearray(path.read_bytes())
    record = np.frombuffer(file, RECORD, 1, PAGE)[0]
    index = np.frombuffer(file, BUCKET, int(record["num_buckets"]), int(record["index_offset"]))
    last = (PAGE - 1) // int(record["row_bytes"])  # begins in the only page of rows
    assert (last + 1) * record["row_bytes"] > PAGE
    index["rows"][index["rows"] >= 0] = last
    path.write_bytes(file)
    log.add(upserts=0, new=0)
    keys = np.array(list(log.versions[0]["films"]))
    with Snapshot(log.path) as snapshot:
        assert snapshot.refresh().version == 1
        assert not snapshot.lookup("films", keys, found=True)[1].any()
