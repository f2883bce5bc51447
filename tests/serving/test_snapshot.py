"""Opening, describing, pinning and closing snapshots, and using them from several threads."""

import contextlib
import ctypes
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from sparsekit.serving import BusyError, Snapshot, SnapshotError, TableInfo, _library

from . import made
from .test_lookup import check, table_of

LIBRARY = _library.load()
BAD_ARGUMENT = 1


def test_it_describes_its_tables(opened, rng):
    one = table_of(rng, 6, name="films", row_format="int4", padding_key=-3, combiner="max")
    two = table_of(rng, 8, name="größe 東京", miss="error")
    file = made.snapshot([one, two], version=7, dense_version=9, step=11, log_id=2**64 - 1)
    snapshot = opened(file)
    assert list(snapshot.tables) == ["films", "größe 東京"]
    films = TableInfo("films", len(one.keys), 6, "int4", 7, "initial", "max", -3)
    assert snapshot.tables["films"] == films
    assert snapshot.tables["größe 東京"].padding_key is None
    assert snapshot.tables["größe 東京"].miss == "error"
    numbers = (snapshot.version, snapshot.dense_version, snapshot.step, snapshot.log_id)
    assert numbers == (7, 9, 11, 2**64 - 1)
    number = ctypes.c_int32()
    name = "größe 東京".encode()
    assert LIBRARY.sk_find_table(snapshot.handle, name, ctypes.byref(number)) == 0
    assert number.value == 1


# A few pages can be locked under any usual limit.
@pytest.mark.parametrize("option", ["verify", "prefault", "lock", "copy"])
def test_options_change_no_result(opened, rng, option):
    table = table_of(rng, 33, n=5000, row_format="int8")
    snapshot = opened([table], **{option: True})
    check(snapshot, table, rng.choice(table.keys, 2000), np.array([0, 3, 2000]), None, "mean")


LIMITED = """
import resource, sys
from sparsekit.serving import Snapshot
resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))
try:
    Snapshot(sys.argv[1], lock=True)
except OSError as error:
    sys.exit(str(error))
"""


@pytest.mark.skipif(os.geteuid() == 0, reason="root has no limit")
def test_memory_that_cannot_be_locked(tmp_path, rng):
    path = tmp_path / "model.sks"
    path.write_bytes(made.snapshot([table_of(rng)]))
    done = subprocess.run([sys.executable, "-c", LIMITED, path], capture_output=True, text=True)
    assert done.stderr.startswith(f"{path}: cannot lock it in memory (ulimit -l is the limit)")


def test_a_closed_snapshot_says_so(opened, rng):
    snapshot = opened([table_of(rng)])
    with snapshot as same:
        assert same is snapshot
    snapshot.close()
    with pytest.raises(ValueError, match=r"model\.sks: the snapshot is closed"):
        snapshot.lookup("table", np.array([1]))
    assert repr(snapshot).endswith("closed)")


def test_a_pinned_snapshot_cannot_be_closed(opened, rng):
    table = table_of(rng)
    snapshot = opened(made.snapshot([table], version=3, dense_version=4))
    with snapshot.pin() as outer, snapshot.pin() as inner:
        assert (outer.version, outer.dense_version) == (3, 4)
        got = inner.lookup("table", table.keys)
        assert got.tobytes() == table.vectors.tobytes()
        with pytest.raises(BusyError, match="a version is pinned"):
            snapshot.close()
    snapshot.close()


def test_pins_that_are_none(opened, rng):
    """A pin that has been given back, or belongs to another snapshot, is refused."""
    file = made.snapshot([table_of(rng)])
    one, other = opened(file, "one.sks"), opened(file, "other.sks")
    pin, feature = _library.Pin(), _library.Feature()

    def look_up(snapshot):
        return LIBRARY.sk_lookup(snapshot.handle, ctypes.byref(pin), ctypes.byref(feature), 0)

    assert look_up(one) == BAD_ARGUMENT
    assert LIBRARY.sk_unpin(one.handle, ctypes.byref(pin)) == BAD_ARGUMENT
    assert LIBRARY.sk_pin_newest(one.handle, ctypes.byref(pin)) == 0
    assert look_up(one) == 0
    assert look_up(other) == BAD_ARGUMENT
    assert LIBRARY.sk_unpin(other.handle, ctypes.byref(pin)) == BAD_ARGUMENT
    assert b"other.sks: pin is not a pinned version" in LIBRARY.sk_message()
    assert LIBRARY.sk_unpin(one.handle, ctypes.byref(pin)) == 0
    assert look_up(one) == BAD_ARGUMENT
    assert LIBRARY.sk_unpin(one.handle, ctypes.byref(pin)) == BAD_ARGUMENT


def test_a_folder_opens_its_newest_base(opened, tmp_path, rng):
    tables = [table_of(rng)]
    for version in (2, 10, 9):
        path = tmp_path / f"base-{version:020d}.sks"
        path.write_bytes(made.snapshot(tables, version=version))
    for name in (".base-00000000000000000099.sks", "base-100.sks", "base-00000000000000000099.sk"):
        (tmp_path / name).write_bytes(b"not a base")
    with Snapshot(tmp_path) as snapshot:
        assert snapshot.version == 10
    path = tmp_path / "base-00000000000000000011.sks"
    path.write_bytes(made.snapshot(tables, version=10))
    with pytest.raises(SnapshotError, match=rf"{path.name}: the header says version 10"):
        Snapshot(tmp_path)


def test_bases_that_are_replaced_while_a_folder_is_opened(tmp_path, rng):
    """Compaction writes a newer base and removes the older one, at any time."""
    file = [made.snapshot([table_of(rng, n=10)], version=version) for version in range(60)]

    def path(version):
        return tmp_path / f"base-{version:020d}.sks"

    def write(version):
        hidden = tmp_path / ".new"
        hidden.write_bytes(file[version])
        hidden.rename(path(version))

    def compact():
        for version in range(1, 60):
            write(version)
            path(version - 1).unlink()

    write(0)
    compaction = threading.Thread(target=compact)
    compaction.start()
    last = 0
    while last < 59:
        with Snapshot(tmp_path) as snapshot:
            assert snapshot.version >= last
            last = snapshot.version
    compaction.join()


def test_a_path_that_is_no_file(tmp_path):
    with pytest.raises(OSError, match=r"none\.sks: cannot open it: No such file"):
        Snapshot(tmp_path / "none.sks")
    with pytest.raises(OSError, match=r"no base-\*\.sks in this folder.*exported first"):
        Snapshot(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe: not a regular file"):
        Snapshot(tmp_path / "pipe")


def test_an_unknown_instruction_set_is_refused(opened, rng, monkeypatch):
    monkeypatch.setenv("SPARSEKIT_SERVING_ISA", "avx513")
    with pytest.raises(ValueError, match='must be generic, avx2 or avx512, but is "avx513"'):
        opened([table_of(rng)])


def test_a_file_stays_readable_after_it_is_removed_or_replaced(opened, rng, tmp_path):
    table = table_of(rng)
    snapshot = opened([table])
    (tmp_path / "new").write_bytes(bytes(10000))
    (tmp_path / "new").rename(tmp_path / "model.sks")
    assert snapshot.lookup("table", table.keys).tobytes() == table.vectors.tobytes()


def test_threads_give_the_same_bits(opened, rng):
    table = table_of(rng, 32, n=2000, row_format="int8")
    snapshot = opened([table])
    keys = rng.choice(table.keys, 3000)
    offsets = np.arange(0, 3001, 5)
    expected = snapshot.lookup("table", keys, offsets).tobytes()
    wrong, begin = [], threading.Barrier(4)

    def look_up():
        begin.wait()
        for _ in range(50):
            with snapshot.pin() as pinned:
                if pinned.lookup("table", keys, offsets).tobytes() != expected:
                    wrong.append(threading.get_ident())

    threads = [threading.Thread(target=look_up) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    snapshot.close()  # all pins have been given back


def test_a_snapshot_is_not_closed_while_a_thread_uses_it(opened, rng):
    snapshot = opened([table_of(rng)])
    inside, go_on = threading.Event(), threading.Event()

    def use():
        with snapshot.using():
            inside.set()
            go_on.wait()

    thread = threading.Thread(target=use)
    thread.start()
    inside.wait()
    with pytest.raises(BusyError, match="another thread uses the snapshot"):
        snapshot.close()
    assert snapshot.version == 0
    go_on.set()
    thread.join()
    snapshot.close()


def test_closing_while_threads_look_up(opened, rng):
    """They get their vectors, or an error that says that the snapshot is closed."""
    table = table_of(rng)
    snapshot = opened([table])
    others = []

    def look_up():
        try:
            while True:
                snapshot.lookup("table", table.keys)
        except ValueError as error:
            others.append(str(error))

    threads = [threading.Thread(target=look_up) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        with contextlib.suppress(BusyError):
            snapshot.close()
    assert [error.endswith("the snapshot is closed") for error in others] == [True] * 3


def test_a_message_belongs_to_its_thread(opened, rng):
    snapshot = opened([table_of(rng)])
    number = ctypes.c_int32()
    LIBRARY.sk_find_table(snapshot.handle, b"mine", ctypes.byref(number))
    messages = []

    def fail():
        messages.append(LIBRARY.sk_message())
        LIBRARY.sk_find_table(snapshot.handle, b"theirs", ctypes.byref(number))
        messages.append(LIBRARY.sk_message())

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert messages[0] == b""
    assert b'no table is named "theirs"' in messages[1]
    assert b'no table is named "mine"' in LIBRARY.sk_message()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
import numpy as np, pytest, sparsekit
from sparsekit.serving import Snapshot
with Snapshot(sys.argv[1]) as snapshot:
    got = snapshot.lookup("table", np.load(sys.argv[2]))
    with pytest.raises(TypeError, match="keys must be a NumPy array"):
        snapshot.lookup("table", [1, 2, 3])
    sys.stdout.buffer.write(got.tobytes())
assert sparsekit.__version__
for name in ("nn", "DistributedEmbedding"):
    with pytest.raises(ImportError, match=f"sparsekit.{name} needs torch, which is not installed"):
        getattr(sparsekit, name)
with pytest.raises(ImportError, match="needs torch"):
    from sparsekit import nn
assert not hasattr(sparsekit, "no_such_name")
assert not [name for name in sys.modules if name.startswith("torch.")]
"""


def test_without_torch(tmp_path, rng):
    table = table_of(rng)
    (tmp_path / "model.sks").write_bytes(made.snapshot([table]))
    np.save(tmp_path / "keys.npy", table.keys)
    command = [sys.executable, "-c", WITHOUT_TORCH, tmp_path / "model.sks", tmp_path / "keys.npy"]
    done = subprocess.run(command, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == table.vectors.tobytes()
