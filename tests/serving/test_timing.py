"""Timing of lookups: what is called, what is counted, and what is shown."""

import json

import numpy as np
import pytest

from sparsekit import cli
from sparsekit.serving import SnapshotWriter, UnknownKeyError
from sparsekit.serving import timing as timing_module
from sparsekit.serving.timing import Load, Times, time_lookups


@pytest.fixture
def path(tmp_path):
    with SnapshotWriter(tmp_path / "tables.sks") as snapshot:
        tables = [
            snapshot.table(name, dim, rows="int8", miss=miss, combiner=combiner)
            for name, dim, miss, combiner in (("a", 5, "zeros", "mean"), ("b", 8, "error", "none"))
        ]
        for table, dim in zip(tables, (5, 8), strict=True):
            keys = np.arange(100) * 7919 - 3
            table.append(keys, np.ones((100, dim), np.float32))
    return tmp_path / "tables.sks"


@pytest.fixture
def called(monkeypatch):
    """Record the keys of each caller's calls, ``[calls, tables, keys]``."""
    seen = []
    original = timing_module._Caller.run

    def run(caller):
        seen.append(caller._keys)
        original(caller)

    monkeypatch.setattr(timing_module._Caller, "run", run)
    return seen


@pytest.mark.parametrize("cold", [False, True])
def test_every_call_of_every_thread_is_timed(path, called, cold):
    times = time_lookups(path, Load(batch=3, keys=2, calls=40, threads=2, cold=cold))
    assert [keys.shape for keys in called] == [(40, 2, 6)] * 2
    assert not np.array_equal(*called)
    known = np.arange(100) * 7919 - 3
    assert all(np.isin(keys, known).all() for keys in called)
    # A tenth of the warm calls is not counted.
    assert len(times.microseconds) == 2 * (40 if cold else 36)
    assert (times.microseconds > 0).all()
    assert (np.diff(times.microseconds) >= 0).all()


def test_rates_follow_from_the_durations():
    times = Times(Load(batch=3, keys=2, threads=4), 5, np.array([100.0, 200.0, 300.0]))
    assert times.calls_per_second == pytest.approx(4 / 200e-6)
    assert times.keys_per_second == pytest.approx(4 / 200e-6 * 3 * 2 * 5)
    assert [times.at(fraction) for fraction in (0, 0.34, 0.67, 1)] == [100, 200, 300, 300]


def test_misses_are_keys_without_a_row(path, called):
    with pytest.raises(UnknownKeyError, match='table "b" has no key'):
        time_lookups(path, Load(misses=1.0, calls=5))
    (keys,) = called
    assert not np.isin(keys, np.arange(100) * 7919 - 3).any()


def test_calls_are_fewer_where_their_keys_would_take_much_memory(path, called, monkeypatch):
    monkeypatch.setattr(timing_module, "_MOST_KEYS", 120)
    times = time_lookups(path, Load(batch=3, keys=2, calls=40))
    assert times.load.calls == 10
    assert called[0].shape == (10, 2, 6)


def test_a_table_without_rows_is_refused(tmp_path):
    with SnapshotWriter(tmp_path / "empty.sks") as snapshot:
        snapshot.table("t", 3, miss="zeros")
    with pytest.raises(ValueError, match=r"empty\.sks: a table has no rows"):
        time_lookups(tmp_path / "empty.sks", Load())
    assert cli.main(["serve", "bench", str(tmp_path / "empty.sks")]) == 2


def test_what_is_no_file_is_refused(tmp_path, capsys):
    assert cli.main(["serve", "bench", str(tmp_path)]) == 2
    assert f"{tmp_path}: is a folder" in capsys.readouterr().err
    assert cli.main(["serve", "bench", str(tmp_path / "none.sks")]) == 2
    assert f"sparsekit: {tmp_path / 'none.sks'}: No such file" in capsys.readouterr().err


def test_a_quantile_needs_enough_calls(path, tmp_path, capsys):
    command = ["serve", "bench", str(path), "--threads", "1", "--batch", "2", "--calls", "150"]
    assert cli.main([*command, "--json", str(tmp_path / "t.json")]) == 0
    _, _, warm, cold = capsys.readouterr().out.splitlines()
    assert warm.split()[:3] == ["warm", "1", "2"]
    assert cold.split()[:3] == ["cold", "1", "2"]
    for record in json.loads((tmp_path / "t.json").read_text()):
        assert record["microseconds"]["p50"] <= record["microseconds"]["p99"]
        assert record["microseconds"]["p99.9"] is None
        assert record["calls_per_second"] * 4 == pytest.approx(record["keys_per_second"])
