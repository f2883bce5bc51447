"""The table of a profile adds up the times and bytes of ranks and ops."""

import json
import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from sparsekit.distributed import Exchange
from sparsekit.train.profile import Op, Profile, _ops, profiled


def rows(table):
    """Return the cells of all lines of a table but the first."""
    return [re.split(r" {2,}", line.strip()) for line in table.splitlines()[1:]]


def test_a_table_adds_up_what_it_does_not_show():
    """The last line sums all ops. Each op that moves bytes has a separate line."""
    name = "a" * 50
    ops = [Op(name, 2, 0.5, 0.5, 0), Op("b", 1500, 0.3, 0.3, 0), Op("c", 3, 0.1, 0.1, 0)]
    ops += [Op("sent", 4, 0.06, 0.06, 1000), Op("sent too", 5, 0.04, 0.04, 24)]
    profile = Profile(ops, ranks=2)
    assert profile.bytes_moved == 1024
    assert profile.seconds == pytest.approx(1.0)
    first = [f"{name[:41]}…", "2", "500.0 ms", "50.0%", "0"]
    sent = [["sent", "4", "60.0 ms", "6.0%", "1,000"], ["sent too", "5", "40.0 ms", "4.0%", "24"]]
    everything = ["all", "1,514", "1,000.0 ms", "100.0%", "1,024"]
    others = ["2 others", "1,503", "400.0 ms", "40.0%", "0"]
    assert rows(profile.table(1)) == [first, *sent, others, everything]
    b, c = ["b", "1,500", "300.0 ms", "30.0%", "0"], ["c", "3", "100.0 ms", "10.0%", "0"]
    assert rows(profile.table()) == [first, b, c, *sent, everything]
    assert str(profile) == profile.table()


@pytest.mark.parametrize("gpu", [False, True])
def test_ops_of_ranks_are_added_up(gpu):
    """Ops are sorted by GPU time if a GPU was used, and otherwise by CPU time."""
    device = (2e6, 6e6) if gpu else (0.0, 0.0)
    here = [("x", 2, 3e6, device[0]), ("y", 1, 1e6, 0.0)]
    there = [("x", 3, 4e6, device[1]), ("z", 7, 8e6, 0.0)]
    found = _ops([(here, Counter(sent=5)), (there, Counter(sent=6, x=1))])
    if gpu:
        expected = [Op("x", 5, 8.0, 1.0, 1), Op("sent", 0, 0.0, 0.0, 11)]
        expected += [Op("y", 1, 0.0, 0.0, 0), Op("z", 7, 0.0, 0.0, 0)]
    else:
        expected = [Op("z", 7, 8.0, 0.5, 0), Op("x", 5, 7.0, 7 / 16, 1)]
        expected += [Op("y", 1, 1.0, 1 / 16, 0), Op("sent", 0, 0.0, 0.0, 11)]
    assert found == expected


def test_code_is_profiled_until_it_ends_or_fails(tmp_path):
    def fail():
        with profiled():
            with pytest.raises(RuntimeError, match="has been entered before"), profiled():
                pass
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    trace = tmp_path / "trace.json"
    with profiled(trace) as profile:
        for sent in (5, 6):
            with Exchange.watch(SimpleNamespace(purpose="towers"), sent):
                torch.ones(3).cumsum(0)
    assert Exchange.watch is None
    ops = {op.name: op for op in profile.ops}
    assert (ops["exchange: towers"].calls, ops["exchange: towers"].bytes_moved) == (2, 11)
    assert (ops["aten::cumsum"].calls, ops["aten::cumsum"].bytes_moved) == (2, 0)
    assert (profile.bytes_moved, profile.ranks) == (11, 1)
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"exchange: towers", "aten::cumsum"} <= names
    with pytest.raises(FileNotFoundError), profiled(tmp_path / "none" / "trace.json"):
        pass


def test_ranks_add_up_and_write_traces_of_their_own(tmp_path, monkeypatch):
    def gathered(into, own):
        into[:] = [own, own]

    dist = SimpleNamespace(
        is_initialized=lambda: True,
        get_world_size=lambda: 2,
        get_rank=lambda: 1,
        all_gather_object=gathered,
    )
    monkeypatch.setattr("sparsekit.train.profile.dist", dist)
    with profiled(tmp_path / "trace.json") as profile:
        torch.ones(3).cumsum(0)
    assert profile.ranks == 2
    assert [op.calls for op in profile.ops if op.name == "aten::cumsum"] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["trace.rank1.json"]
