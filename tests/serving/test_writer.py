"""Snapshots are written whole or not at all, and have what the NumPy reader finds in them."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from patience import patience

from sparsekit.serving import Snapshot, SnapshotWriter
from sparsekit.serving.draft import Draft
from sparsekit.serving.format import ROW_FORMATS

from . import numpy_reader

ROOT = Path(__file__).parents[2]


def vectors_of(keys, dim):
    return np.sin(np.asarray(keys)[:, None] + np.arange(dim) / 7).astype(np.float32)


def write(path, keys=range(100), **options):
    with SnapshotWriter(path) as snapshot:
        table = snapshot.table("table", 3, **options)
        table.append(np.array(keys), vectors_of(keys, 3))


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "a.sks"
    before = time.time_ns()
    random = np.random.default_rng(0)
    keys = {"user": random.integers(-(2**63), 2**63, 50_000), "película": np.arange(7)}
    with SnapshotWriter(
        path, log_id=2**64 - 3, version=12, dense_version=2**63, step=77, note="of a test"
    ) as snapshot:
        user = snapshot.table(
            "user", 80, rows="float16", miss="initial", initializer=("normal", 0.5, 2.0), seed=-9,
            combiner="sqrtn", padding_key=-5,
        )  # fmt: skip
        film = snapshot.table("película", 5, rows="bfloat16", miss="error", index_seed=3)
        snapshot.table("empty", 1)
        film.append(keys["película"], vectors_of(keys["película"], 5))
        for part in np.array_split(keys["user"], [1, 100, 101]):
            user.append(part, vectors_of(part, 80))
        assert os.listdir(tmp_path) != ["a.sks"]
    assert os.listdir(tmp_path) == ["a.sks"]
    found = numpy_reader.Snapshot(path)
    assert (found.log_id, found.version, found.dense_version, found.step, found.note) == (
        2**64 - 3, 12, 2**63, 77, "of a test",
    )  # fmt: skip
    assert before <= found.written_at <= time.time_ns()
    assert list(found.tables) == ["user", "película", "empty"]
    table = found.tables["user"]
    facts = ("row_format", "dim", "row_bytes", "miss", "distribution", "initial_seed", "a", "b")
    assert [getattr(table, fact) for fact in facts] == [1, 80, 160, 0, 2, 2**64 - 9, 0.5, 2.0]
    assert (table.combiner, table.has_padding_key, table.padding_key) == (2, 1, -5)
    assert table.num_rows == len(keys["user"])
    for key in keys["user"][::5000].tolist():
        expected = vectors_of([key], 80)[0].astype(np.float16)
        np.testing.assert_array_equal(table.vector(key), expected.astype(np.float32))
    assert found.tables["película"].find(7) is None
    assert [found.tables["película"].find(key) is not None for key in range(7)] == [True] * 7
    assert found.tables["empty"].num_rows == 0
    with Snapshot(path, verify=True) as same:  # the library checks more than the NumPy reader
        assert same.version == 12
        assert list(same.tables) == list(found.tables)
        np.testing.assert_array_equal(
            same.lookup("user", keys["user"][:99]),
            [table.vector(key) for key in keys["user"][:99].tolist()],
        )


@pytest.mark.parametrize("rows", ROW_FORMATS)
def test_rows_that_are_encoded_already(tmp_path, rows):
    keys, path = np.arange(30), tmp_path / "a.sks"
    write(path, keys, rows=rows)
    table = numpy_reader.Snapshot(path).tables["table"]
    encoded = np.stack([table.find(key) for key in keys.tolist()])
    with SnapshotWriter(tmp_path / "b.sks") as snapshot:
        copy = snapshot.table("table", 3, rows=rows)
        copy.append_encoded(keys[:9], encoded[:9])
        copy.append_encoded(keys[9:], encoded[9:])
        with pytest.raises(ValueError, match=r"b.sks: table table: encoded rows must be uint8"):
            copy.append_encoded(keys, encoded[:, 1:])
    copied = numpy_reader.Snapshot(tmp_path / "b.sks").tables["table"]
    np.testing.assert_array_equal(copied.rows, table.rows)
    assert copied.rows_crc == table.rows_crc


WRONG = {
    "a format": ({"rows": "int9"}, "rows must be one of float32, .*; got 'int9'"),
    "a miss": ({"miss": "nothing"}, "miss must be one of initial, .*; got 'nothing'"),
    "a combiner": ({"combiner": "avg"}, "combiner must be one of sum, .*; got 'avg'"),
    "a distribution": ({"initializer": ("x", 0, 1)}, "distribution must be one of .*; got 'x'"),
    "an infinity": ({"initializer": ("normal", 0, 1e39)}, "initializer must have finite numbers"),
    "fallbacks": ({"fallbacks": 2}, "miss='zeros' cannot have fallbacks=2"),
    "no fallbacks": ({"miss": "fallback"}, "miss='fallback' cannot have fallbacks=0"),
    "a dim": ({"dim": 0}, r"dim must be in \[1, 1048576\], got 0"),
    "a long name": ({"name": "a" * 4097}, r"number of bytes must be in \[1, 4096\], got 4097"),
    "no text": ({"name": "a\udcff"}, "the name must be UTF-8 without zeros, got "),
    "a zero": ({"name": "a\0b"}, "the name must be UTF-8 without zeros, got "),
    "two names": ({"name": "other"}, "there are two tables of this name"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_options_of_a_table_are_refused(tmp_path, wrong):
    options, message = WRONG[wrong]
    options = {"name": "user", "dim": 3, **options}
    with SnapshotWriter(tmp_path / "a.sks") as snapshot:
        snapshot.table("other", 1)
        with pytest.raises(ValueError, match=message) as caught:
            snapshot.table(options.pop("name"), options.pop("dim"), **options)
        assert str(caught.value).startswith(f"{tmp_path}/a.sks: table ")
    assert list(numpy_reader.Snapshot(tmp_path / "a.sks").tables) == ["other"]


NAN = np.array([[0, 0], [0, 0], [np.nan, 0]], np.float32)
REFUSED = {
    "a key twice": ([5, 6, 5], np.zeros((3, 2), np.float32), {}, "key 5 occurs twice, in rows 0 a"),
    "nan": ([1, 2, -7], NAN, {}, "key -7 cannot be stored as float32: column 0 is nan"),
    "far": ([1, 2, 3], NAN * 0 + 7e4, {"rows": "float16"}, "key 1 cannot be stored as float16"),
    "float keys": ([1.0, 2.0], np.zeros((2, 2)), {}, r"keys must be int64 or int32 \[n\], got flo"),
    "a shape": ([1, 2], np.zeros((2, 3)), {}, r"vectors must be floats \[2, 2\], got .* \[2, 3\]"),
    "integers": ([1, 2], np.zeros((2, 2), int), {}, "vectors must be floats .* got int64"),
    "no fallback row": (
        [-(2**63), 3], np.zeros((2, 2)), {"miss": "fallback", "fallbacks": 2},
        "key -9223372036854775807, a fallback row, has no row",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", REFUSED)
def test_rows_that_are_refused_leave_the_older_snapshot(tmp_path, wrong):
    keys, vectors, options, message = REFUSED[wrong]
    if wrong == "far":
        vectors = np.nan_to_num(vectors, nan=7e4)
    path = tmp_path / "a.sks"
    write(path)
    before = path.read_bytes()
    with (
        pytest.raises((ValueError, TypeError), match=message) as caught,
        SnapshotWriter(path) as snapshot,
    ):
        snapshot.table("user", 2, **options).append(keys, vectors)
    assert str(caught.value).startswith(f"{path}: table user: ")
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["a.sks"]


def test_the_order_of_calls(tmp_path):
    with SnapshotWriter(tmp_path / "a.sks") as snapshot:
        one, two = snapshot.table("one", 1), snapshot.table("two", 1)
        one.append([1], [[1.0]])
        with pytest.raises(RuntimeError, match="table three: add all tables before any has rows"):
            snapshot.table("three", 1)
        two.append([1], [[1.0]])
        with pytest.raises(RuntimeError, match="table one: is complete; fill tables one after"):
            one.append([2], [[1.0]])
    found = numpy_reader.Snapshot(tmp_path / "a.sks")
    assert [table.num_rows for table in found.list] == [1, 1]


def test_a_snapshot_replaces_a_snapshot_and_nothing_else(tmp_path):
    path = tmp_path / "a.sks"
    write(path, range(5))
    with Snapshot(path) as old:
        write(path, range(9))
        assert old.tables["table"].rows == 5
        np.testing.assert_array_equal(old.lookup("table", np.arange(5)), vectors_of(range(5), 3))
    assert numpy_reader.Snapshot(path).tables["table"].num_rows == 9
    (tmp_path / "file").write_text("text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for other in ("file", "folder", "link"):
        with pytest.raises(FileExistsError, match=f"{other}: there is something already"):
            write(tmp_path / other)
    assert (tmp_path / "file").read_text() == "text"
    with pytest.raises(OSError, match=r"No such file or directory: '.*/nowhere/a.sks'"):
        write(tmp_path / "nowhere" / "a.sks")


def test_an_interrupt_leaves_nothing(tmp_path):
    def interrupted():
        with SnapshotWriter(tmp_path / "a.sks") as snapshot:
            snapshot.table("table", 3).append([1], np.zeros((1, 3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == []


# A process that writes a snapshot and stops in the middle of it, with a part of its rows written.
WRITER = """
import sys, time
import numpy as np
from sparsekit.serving import SnapshotWriter
with SnapshotWriter(sys.argv[1]) as snapshot:
    table = snapshot.table("table", 64)
    table.append(np.arange(10_000), np.zeros((10_000, 64), np.float32))
    print("half", flush=True)
    time.sleep(1000)
"""


def stopped_writer(path):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert writer.stdout.readline() == "half\n"
    return writer


def test_a_killed_writer_leaves_what_was_there(tmp_path):
    path = tmp_path / "a.sks"
    write(path, range(5))
    before = path.read_bytes()
    writer = stopped_writer(path)
    assert path.read_bytes() == before
    (draft,) = set(os.listdir(tmp_path)) - {"a.sks"}
    assert draft.startswith(".a.sks.part-")
    # While it lives, others let its draft be, and so does a writer of the same file.
    write(tmp_path / "b.sks")
    write(path, range(7))
    assert draft in os.listdir(tmp_path)
    writer.kill()
    writer.wait(patience(60))
    writer.stdout.close()
    assert numpy_reader.Snapshot(path).tables["table"].num_rows == 7
    assert draft in os.listdir(tmp_path)
    write(tmp_path / "b.sks")
    assert sorted(os.listdir(tmp_path)) == ["a.sks", "b.sks"]


def test_only_drafts_are_removed(tmp_path):
    names = [".a.sks.part-0123456789abcdef", ".a.sks.part-x", ".hidden", "a.part-0123456789abcdef"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    pipe, folder = ".p.part-0123456789abcdef", ".f.part-0123456789abcdef"
    os.mkfifo(tmp_path / pipe)
    (tmp_path / folder).mkdir()
    write(tmp_path / "a.sks")  # and does not wait for another end of the pipe
    assert set(os.listdir(tmp_path)) - {pipe} == {*names[1:], folder, "a.sks"}


def test_a_draft_that_others_remove_before_it_is_locked(tmp_path, monkeypatch):
    real, removed = os.stat, []

    def stat(path, *args, **kwargs):
        if ".part-" in os.fspath(path) and len(removed) < 3:
            removed.append(path)
            os.unlink(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", stat)
    draft = Draft(tmp_path / "a")
    assert len(removed) == 3
    assert [tmp_path / name for name in os.listdir(tmp_path)] == [draft.path]
    draft.end()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    """A limit of file sizes acts like a full disk, in rows and in the index."""
    path = tmp_path / "a.sks"
    write(path, range(5))
    before = path.read_bytes()
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    keys = range(20_000)
    try:
        for limit in (4096, 100_000, 300_000, 2**20):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
            if limit < 2**20:
                with pytest.raises(OSError, match=f"too large: '{path}'") as caught:
                    write(path, keys)
                assert caught.value.errno == errno.EFBIG
                assert path.read_bytes() == before
                assert os.listdir(tmp_path) == ["a.sks"]
            else:
                write(path, keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert numpy_reader.Snapshot(path).tables["table"].num_rows == len(keys)


def test_errors_of_the_disk_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "a.sks"

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for name in ("fsync", "replace", "posix_fallocate"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
                write(path)
        assert os.listdir(tmp_path) == []


def test_memory_holds_keys_and_not_rows(tmp_path):
    """Rows of 64 MiB are written with a limit of memory that has no room for them."""
    code = """
import resource, sys
import numpy as np
from sparsekit.serving import SnapshotWriter, encoding
encoding.crc32(b"")  # loads the library
with SnapshotWriter(sys.argv[1]) as snapshot:
    table = snapshot.table("table", 4096)
    table.append([-1], np.zeros((1, 4096), np.float32))
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (32 << 20),) * 2)
    for row in range(4096):
        table.append([row], np.full((1, 4096), row, np.float32))
"""
    subprocess.run(
        [sys.executable, "-c", code, tmp_path / "a.sks"], check=True, timeout=patience(120),
        cwd=ROOT,
    )  # fmt: skip
    with Snapshot(tmp_path / "a.sks") as snapshot:
        assert (snapshot.lookup("table", np.array([4095])) == 4095).all()


def test_snapshots_are_written_without_torch(tmp_path):
    code = """
import sys
sys.modules["torch"] = None  # so that its import fails
import numpy as np
from sparsekit.serving import Snapshot, SnapshotWriter, encoding, fbgemm
vectors = np.linspace(-1, 1, 40, dtype=np.float32).reshape(10, 4)
front = fbgemm.to_front(encoding.encode_rows(vectors, "int8"), 4, "int8")
rows = fbgemm.from_front(front, 4, "int8")
with SnapshotWriter(sys.argv[1]) as snapshot:
    one, two = snapshot.table("one", 4), snapshot.table("two", 4, rows="int8")
    one.append(np.arange(10), vectors)
    two.append_encoded(np.arange(10), rows)
with Snapshot(sys.argv[1], verify=True) as snapshot:
    assert (snapshot.lookup("one", np.arange(10)) == vectors).all()
    assert abs(snapshot.lookup("two", np.arange(10)) - vectors).max() < 0.001
try:
    from sparsekit.serving import export_module
except ImportError:
    print("torch is missing")
"""
    command = [sys.executable, "-c", code, tmp_path / "a.sks"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "torch is missing\n"), done.stderr
