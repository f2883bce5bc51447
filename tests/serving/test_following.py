"""Readers follow a log: every version is whole, and errors leave the last good one."""

import ctypes
import gc
import random
import shutil
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from patience import patience

from sparsekit.cli import main
from sparsekit.serving import BusyError, Snapshot, SnapshotError, _library
from sparsekit.serving.log_folder import compact

from .logs import LOG_ID, Log

BAD_ARGUMENT = 1  # SK_BAD_ARGUMENT


def memory():
    """Return the memory of this process that is not shared, in bytes."""
    gc.collect()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = [int(line.split()[1]) for line in lines if line.startswith("Private_")]
    return 1024 * sum(sizes)


def bytes_behind_rows():
    """Return the size of the memory that lies right behind mappings of bases."""
    total, behind = 0, None
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *rest = line.split()
        begin, end = (int(address, 16) for address in addresses.split("-"))
        if "/base-" in rest[-1]:
            behind = end
        elif begin == behind and access.startswith("rw"):
            total += end - begin
            behind = end
    return total


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("ranks", [1, 3])
def test_each_version_is_served(tmp_path, ranks, copy):
    log = Log(tmp_path / "log", seed=ranks, ranks=ranks)
    with Snapshot(log.path, copy=copy) as snapshot:
        log.assert_serves(snapshot, 0)
        for _ in range(12):
            # Many new keys, so that indexes grow: the last one is ten times as long as the first.
            log.add(new=100)
            progress = snapshot.refresh()
            assert (progress.version, progress.deltas) == (log.last, 1)
            assert snapshot.step == 3 * log.last
            log.assert_serves(snapshot, log.last)
        assert snapshot.tables["films"].rows == len(log.versions[log.last]["films"])


def test_versions_are_taken_over_together(tmp_path):
    log = Log(tmp_path / "log", ranks=2)
    with Snapshot(log.path) as snapshot:
        for count in (1, 5, 2, 17, 1):
            for _ in range(count):
                log.add(upserts=60, erased=30, new=30)
            progress = snapshot.refresh()
            assert (progress.version, progress.deltas) == (log.last, count)
            log.assert_serves(snapshot, log.last)
        assert snapshot.refresh().deltas == 0


def test_a_pinned_version_stays(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        for _ in range(4):
            version = log.last
            with snapshot.pin() as pinned:
                log.add()
                assert snapshot.refresh().version == version + 1
                log.assert_serves(pinned, version)
                log.assert_serves(snapshot, version + 1)
                log.add()
                for _ in range(2):
                    with pytest.raises(BusyError, match=f"version {version} is pinned"):
                        snapshot.refresh()
                    log.assert_serves(pinned, version)
                    log.assert_serves(snapshot, version + 1)
            assert snapshot.refresh().version == log.last
            log.assert_serves(snapshot, log.last)


def test_a_pinned_version_stays_when_its_base_goes(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        log.add()
        snapshot.refresh()
        with snapshot.pin() as pinned:
            log.add()
            assert compact(log.path) == 2
            assert snapshot.refresh().version == 2
            log.assert_serves(pinned, 1)
            log.add()
            compact(log.path)
            with pytest.raises(BusyError):
                snapshot.refresh()
            log.assert_serves(pinned, 1)
            log.assert_serves(snapshot, 2)
        snapshot.refresh()
        log.assert_serves(snapshot, 3)
        snapshot.refresh()
        mapped = Path("/proc/self/maps").read_text()
        assert log.base(3).name in mapped
        assert log.base(0).name not in mapped  # nobody needs them any more
        assert log.base(2).name not in mapped


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gap_is_an_error_that_names_the_file(tmp_path, ranks):
    log = Log(tmp_path / "log", ranks=ranks)
    with Snapshot(log.path) as snapshot:
        for _ in range(4):
            log.add()
        missing = log.delta(3, ranks - 1)
        missing.rename(tmp_path / "elsewhere")
        for _ in range(2):
            with pytest.raises(SnapshotError, match=missing.name):
                snapshot.refresh()
            log.assert_serves(snapshot, 2)  # those before the gap are taken over
        (tmp_path / "elsewhere").rename(missing)
        snapshot.refresh()
        log.assert_serves(snapshot, 4)


def test_a_version_waits_for_all_ranks(tmp_path):
    log = Log(tmp_path / "log", ranks=2)
    with Snapshot(log.path) as snapshot:
        parts = log.add(only_ranks=[1])
        assert snapshot.refresh().deltas == 0
        log.write_part(1, 0, parts[0])
        snapshot.refresh()
        log.assert_serves(snapshot, 1)
        # A part that never comes: a restarted trainer writes a base above all that is there.
        log.add(only_ranks=[0])
        assert snapshot.refresh().version == 1
        log.add(only_ranks=[])
        log.write_base(3)
        assert snapshot.refresh().version == 3
        log.assert_serves(snapshot, 3)


def test_parts_of_different_numbers_of_ranks_are_refused(tmp_path):
    log = Log(tmp_path / "log", ranks=2)
    with Snapshot(log.path) as snapshot:
        log.add()
        shutil.copy(log.delta(1), log.path / log.delta(1).name.replace("of-00002", "of-00003"))
        with pytest.raises(SnapshotError, match=r"from [23] ranks"):
            snapshot.refresh()
        log.assert_serves(snapshot, 0)


def test_versions_never_go_back(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        for _ in range(4):
            log.add()
        snapshot.refresh()
        # A base comes that needs deltas which are no longer there.
        log.write_base(2)
        log.delta(4).rename(tmp_path / "elsewhere")
        with pytest.raises(SnapshotError, match=log.delta(4).name):
            snapshot.refresh()
        log.assert_serves(snapshot, 4)
        (tmp_path / "elsewhere").rename(log.delta(4))
        snapshot.refresh()
        log.assert_serves(snapshot, 4)
        mapped = Path("/proc/self/maps").read_text()
        assert log.base(2).name in mapped


def test_another_log_is_refused(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        other = Log(tmp_path / "other", seed=1, log_id=LOG_ID + 1)
        other.add()
        shutil.copy(other.delta(1), log.path)
        with pytest.raises(SnapshotError, match=rf"{log.delta(1).name}: belongs to log 0+abd"):
            snapshot.refresh()
        log.delta(1).unlink()
        other.write_base(1)
        shutil.copy(other.base(1), log.path)
        with pytest.raises(SnapshotError, match=rf"{other.base(1).name}: belongs to log 0+abd"):
            snapshot.refresh()
        log.base(0).unlink()
        log.base(1).unlink()
        with pytest.raises(SnapshotError, match=f"{log.base(0).name}.* no longer there"):
            snapshot.refresh()
        shutil.rmtree(log.path)
        with pytest.raises(OSError, match="cannot be listed"):
            snapshot.refresh()
        log.assert_serves(snapshot, 0)


def test_a_file_has_no_folder_to_follow(tmp_path):
    log = Log(tmp_path / "log")
    with Snapshot(log.base(0)) as snapshot, pytest.raises(ValueError, match="opened by its file"):
        snapshot.refresh()
    with Snapshot(log.base(0)) as snapshot, pytest.raises(ValueError, match="open the folder"):
        snapshot.follow()


def test_progress_is_filled_in_on_errors_too(tmp_path):
    log = Log(tmp_path / "log", seed=3)
    log.add()
    with Snapshot(log.path) as snapshot:
        snapshot.refresh()
        progress = _library.Progress()
        library = _library.load()
        assert library.sk_apply(snapshot.handle, None, 0, ctypes.byref(progress)) == BAD_ARGUMENT
        assert progress.version == snapshot.version > 0
    with Snapshot(log.base(0)) as snapshot:
        progress = _library.Progress(version=99)
        assert library.sk_follow(snapshot.handle, ctypes.byref(progress)) == BAD_ARGUMENT
        assert progress.version == snapshot.version == 0
        assert str(log.base(0)) in library.sk_message().decode()


def test_rows_that_change_often_use_little_memory(tmp_path):
    log = Log(tmp_path / "log", keys=6000)
    with Snapshot(log.path) as snapshot:
        most = 0
        for version in range(30):
            log.versions = {log.last: log.versions[log.last]}
            log.add(upserts=4500, erased=200, new=200)
            snapshot.refresh()
            if version == 5:
                most = bytes_behind_rows()
        # A version has rows of 108 KB; the memory comes in pieces of 2 MB.
        assert 0 < bytes_behind_rows() == most


def test_bases_that_are_replaced_use_no_memory(tmp_path):
    log = Log(tmp_path / "log", keys=20000)
    with Snapshot(log.path, copy=True) as snapshot:

        def rebase(times):
            for _ in range(times):
                log.versions = {log.last: log.versions[log.last]}
                log.add()
                compact(log.path)
                snapshot.refresh()

        rebase(3)
        before = memory()
        rebase(10)
        assert memory() - before < 8e6  # a base and its indexes take 4 MB
        log.assert_serves(snapshot, log.last)


def test_files_that_vanish_while_they_are_read(tmp_path):
    """A compaction under readers removes a base and deltas at any moment."""
    log = Log(tmp_path / "log", ranks=2)
    stop = threading.Event()
    errors = []

    def read():
        chance = random.Random(threading.get_ident())
        try:
            while not stop.is_set():
                newest = 0
                with Snapshot(log.path, verify=True) as snapshot:
                    for _ in range(chance.randrange(20)):
                        with snapshot.pin() as pinned:
                            assert pinned.version >= newest
                            newest = pinned.version
                            versions = dict(log.versions)
                            if newest in versions:
                                log.assert_serves(pinned, newest)
                        snapshot.refresh()
        except Exception as error:
            errors.append(error)
            stop.set()

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    chance = random.Random(1)
    for _ in range(60):
        if stop.is_set():
            break
        log.add()
        if chance.random() < 0.4:
            assert compact(log.path) == log.last
    stop.set()
    for reader in readers:
        reader.join()
    assert not errors, errors


def test_a_thread_follows(tmp_path):
    log = Log(tmp_path / "log")

    def wait_for(condition):
        end = time.monotonic() + patience(20)
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.001)

    with Snapshot(log.path) as snapshot:
        follower = snapshot.follow(every=0.001)
        for _ in range(5):
            log.add()
            wait_for(lambda: snapshot.version == log.last)
            log.assert_serves(snapshot, log.last)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            parts = log.add(only_ranks=[])
            log.add()
            wait_for(lambda: follower.error is not None)
            first = follower.error
            wait_for(lambda: follower.error is not first)
            log.write_part(6, 0, parts[0])
            wait_for(lambda: snapshot.version == log.last)
            wait_for(lambda: follower.error is None)
        assert [log.delta(6).name in str(each.message) for each in shown] == [True]
    assert not follower.is_alive


def test_a_snapshot_that_nobody_uses_ends_its_thread(tmp_path):
    log = Log(tmp_path / "log")
    snapshot = Snapshot(log.path)
    follower = snapshot.follow(every=0.001)
    del snapshot
    end = time.monotonic() + patience(20)
    while follower.is_alive:
        assert time.monotonic() < end
        gc.collect()
        time.sleep(0.001)


def test_compaction_keeps_the_options_of_tables(tmp_path):
    log = Log(tmp_path / "log")
    for _ in range(3):
        log.add(upserts=40, erased=30, new=60)
    assert compact(log.path) == 3
    assert sorted(path.name for path in log.path.glob("[bd]*")) == [log.base(3).name]
    with Snapshot(log.path, verify=True) as snapshot:
        log.assert_serves(snapshot, 3)
        assert (snapshot.log_id, snapshot.step) == (LOG_ID, 9)
        assert snapshot.tables["users"].miss == "zeros"
        assert snapshot.tables["users"].combiner == "mean"
    before = log.base(3).read_bytes()
    assert compact(log.path) == 3
    assert log.base(3).read_bytes() == before


def test_erased_keys_leave_no_bytes_in_a_compacted_base(tmp_path):
    log = Log(tmp_path / "log")
    before = log.versions[0]["films"]
    log.add(erased=50)
    gone = [key for key in before if key not in log.versions[1]["films"]]
    assert len(gone) > 30
    compact(log.path)
    data = b"".join(path.read_bytes() for path in log.path.rglob("*") if path.is_file())
    for key in gone:
        assert np.int64(key).tobytes() not in data
        assert before[key].tobytes() not in data
    kept = next(iter(log.versions[1]["films"]))
    assert np.int64(kept).tobytes() in data


def test_a_killed_compaction_leaves_nothing_that_matters(tmp_path, monkeypatch):
    log = Log(tmp_path / "log")
    with Snapshot(log.path) as snapshot:
        log.add()
        with monkeypatch.context() as patch:

            def killed(*_):
                raise KeyboardInterrupt

            patch.setattr("sparsekit.serving.log_folder.LogFolder.remove_before", killed)
            with pytest.raises(KeyboardInterrupt):
                compact(log.path)
        snapshot.refresh()
        log.assert_serves(snapshot, 1)
        log.add()
        assert compact(log.path) == 2
        assert sorted(path.name for path in log.path.glob("[bd]*")) == [log.base(2).name]
        snapshot.refresh()
        log.assert_serves(snapshot, 2)


def test_a_command_compacts(tmp_path, capsys):
    log = Log(tmp_path / "log")
    log.add()
    assert main(["serve", "compact", str(log.path)]) == 0
    assert capsys.readouterr().out == f"{log.path}: the base has version 1\n"
    assert not log.delta(1).exists()
    log.add()
    log.delta(2).write_bytes(b"no delta")
    assert main(["serve", "compact", str(log.path)]) == 2
    assert f"{log.delta(2)}: damaged" in capsys.readouterr().err
    assert main(["serve", "compact", str(tmp_path)]) == 2
    assert "there is no base" in capsys.readouterr().err
    assert not (tmp_path / ".compacting").exists()
    assert main(["serve", "compact", str(tmp_path / "lg")]) == 2
    assert f"{tmp_path / 'lg'}: No such file" in capsys.readouterr().err
    with Snapshot(log.path) as snapshot:
        log.assert_serves(snapshot, 1)
