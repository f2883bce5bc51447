"""A command loads its data once, and trains on one rank or on several."""

import argparse
import pickle
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from sparsekit._extras import MissingPackageError
from sparsekit.cli import ranks
from sparsekit.cli.common import EXPECTED, UsageError
from sparsekit.datasets import DatasetUnavailableError, RatingsFormatError
from sparsekit.errors import CheckpointError, DataFormatError, DivergedError, ResumeError
from sparsekit.train.config import ConfigError
from sparsekit.train.launch import RankError


def arguments(**others):
    return argparse.Namespace(
        **{"save": None, "data": None, "log": None, "ranks": 1, "threads": None, **others}
    )


@pytest.fixture
def calls(monkeypatch):
    """Record calls of functions of `ranks` and torch.distributed instead of making them."""
    made = []

    def record(owner, name, result=None):
        monkeypatch.setattr(owner, name, lambda *a, **k: made.append((name, *a)) or result)

    for name in ("run_on_ranks", "start_rank", "discard_output"):
        record(ranks, name)
    for name in ("init_process_group", "barrier", "destroy_process_group"):
        record(dist, name)
    record(ranks.checkpoints, "prepare")
    record(ranks, "store_of_attempt")
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: False)
    return made


@pytest.mark.parametrize(
    ("elastic", "rank", "prepares"),
    [
        (False, None, True),
        (False, "1", True),
        (True, None, True),
        (True, "0", True),
        (True, "1", False),
    ],
)
def test_one_process_prepares_the_checkpoints(calls, monkeypatch, elastic, rank, prepares):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: elastic)
    monkeypatch.setattr(ranks, "start", lambda *started: started)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    args = arguments()
    assert ranks.train(args, "load", "fit") == (args, "load", "fit")
    assert calls == [("prepare", args)] * prepares


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save": "no/model"}, "--save no/model: cannot write"),
        ({"save": "file", "data": "file"}, "--save file: is the file that is read"),
        ({"log": "file"}, "--log-to file: is a file"),
        ({"log": "run", "save": "run/metrics.jsonl"}, "metrics.jsonl: is the file of --log-to"),
        ({"log": "no/run"}, "--log-to no/run: cannot write"),
    ],
)
def test_files_are_checked_before_anything_is_loaded(
    calls, tmp_path, monkeypatch, options, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir()
    with pytest.raises(UsageError, match=message):
        ranks.train(arguments(**options), None, None)
    assert calls == []
    monkeypatch.setattr(ranks, "start", lambda *_: 7)
    assert ranks.train(arguments(save="file", data=["file"], log="run"), None, None) == 7


@pytest.mark.parametrize("status", [0, 130])
def test_one_rank_is_this_process(calls, status):
    args = arguments()
    fitted = ranks.start(args, lambda args: [args], lambda data, args: (status, data, args))
    assert fitted == (status, [args], args)
    assert calls == []


class Shown:
    """Stand-in for the progress bar: records whether it was cleared."""

    cleared = 0

    def __init__(self, *_):
        pass

    def clear(self):
        Shown.cleared += 1


def load(args):
    return ["data"]


def fit(data, args):
    return 130


def test_several_ranks_get_the_data(calls, monkeypatch):
    monkeypatch.setattr(ranks, "Progress", Shown)
    monkeypatch.setattr(Shown, "cleared", 0)
    args = arguments(ranks=3)
    assert ranks.start(args, load, fit) == 0
    ((_, world_size, function, *given, data),) = calls
    assert (world_size, function, given) == (3, ranks.run_as_rank, [args, load, fit])
    assert pickle.loads(data) == ["data"]
    assert Shown.cleared == 1


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        *((kind, UsageError) for kind in (
            UsageError, DatasetUnavailableError, RatingsFormatError, DataFormatError,
            CheckpointError, ResumeError, MissingPackageError, ConfigError,
        )),
        (DivergedError, DivergedError),
        (BrokenPipeError, BrokenPipeError),
        (ZeroDivisionError, RankError),
    ],
)  # fmt: skip
def test_an_error_of_a_rank_is_raised_here(monkeypatch, kind, raised):
    assert set(EXPECTED) >= ({kind} if raised is UsageError else set())

    def failing(*_):
        message = {"message": f"{kind.__name__}: why: x", "extraInfo": {"py_callstack": "where"}}
        raise RankError(1, SimpleNamespace(exitcode=1, message=message))

    monkeypatch.setattr(ranks, "run_on_ranks", failing)
    monkeypatch.setattr(ranks, "Progress", Shown)
    monkeypatch.setattr(Shown, "cleared", 0)
    with pytest.raises(raised) as caught:
        ranks.start(arguments(ranks=2), load, fit)
    assert type(caught.value) is raised
    said = {BrokenPipeError: "", RankError: "rank 1 failed\nwhere"}.get(raised, "why: x")
    assert str(caught.value) == said
    assert Shown.cleared == 1


@pytest.mark.parametrize("packed", [False, True])
def test_a_rank_joins_fits_waits_and_leaves(calls, monkeypatch, packed):
    def fits(data, args):
        calls.append(("fit", data))
        return 130

    monkeypatch.setattr(ranks, "_load_once", lambda args, load: load(args))
    data = pickle.dumps(None) if packed else None
    assert ranks.run_as_rank(arguments(), load, fits, data) == 130
    assert calls == [
        *(("start_rank",), ("store_of_attempt",), ("init_process_group", "gloo")),
        *(("fit", None if packed else ["data"]), ("barrier",), ("destroy_process_group",)),
    ]


@pytest.mark.parametrize("error", [BrokenPipeError, ZeroDivisionError])
def test_a_rank_that_fails_does_not_wait(calls, error):
    def fails(data, args):
        raise error

    with pytest.raises(error):
        ranks.run_as_rank(arguments(), load, fails, pickle.dumps(1))
    assert calls[3:] == [("discard_output",)] * (error is BrokenPipeError)


def test_torchrun_has_started_the_ranks(calls, monkeypatch):
    monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(ranks, "run_as_rank", lambda *started: started)
    args = arguments(ranks=5)
    assert ranks.start(args, load, fit) == (args, load, fit)


def test_a_store_of_torchrun_is_used(monkeypatch):
    joined = []
    monkeypatch.setattr(ranks, "store_of_attempt", lambda: "store")
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: joined.append((a, k)))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "5")
    ranks._join()
    assert joined == [(("gloo",), {"store": "store", "rank": 2, "world_size": 5})]


@pytest.mark.parametrize("loaded", [["data"], None, ValueError("bad")])
def test_rank_0_loads_for_all(monkeypatch, loaded):
    def loads(args):
        if isinstance(loaded, Exception):
            raise loaded
        return loaded

    sent = []
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects: sent.append(list(objects)))
    if isinstance(loaded, Exception):
        with pytest.raises(ValueError, match=r"^bad$"):
            ranks._load_once(arguments(), loads)
        assert sent == [[False, None]]
    else:
        assert ranks._load_once(arguments(), loads) == loaded
        assert sent == [[True, loaded]]


@pytest.mark.parametrize("sent", [[True, "data"], [True, None], [False, None]])
def test_other_ranks_get_what_rank_0_has_loaded(monkeypatch, sent):
    def receive(objects):
        objects[:] = sent

    monkeypatch.setattr(ranks, "rank", lambda: 1)
    monkeypatch.setattr(dist, "broadcast_object_list", receive)
    if sent[0]:
        assert ranks._load_once(arguments(), None) == sent[1]
    else:
        with pytest.raises(SystemExit, match=r"^2$"):
            ranks._load_once(arguments(), None)


def test_a_command_may_be_profiled_instead(monkeypatch):
    monkeypatch.setattr(ranks, "profile_fit", lambda *given: given)
    args = arguments(trace=None)
    assert ranks._fit("fit", "data", args) == ("fit", "data", args)
    assert ranks._fit(lambda *given: given, "data", arguments()) == ("data", arguments())


def test_rank_0_writes_the_log(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    assert ranks.logs(arguments()) == []
    monkeypatch.setattr(ranks, "rank", lambda: 1)
    assert ranks.logs(arguments(log=str(folder))) == []
    assert not folder.exists()
    monkeypatch.setattr(ranks, "rank", lambda: 0)
    for _ in range(2):
        (log,) = ranks.logs(arguments(log=str(folder)))
        assert str(log) == str(folder / "metrics.jsonl")
        assert folder.is_dir()
    with pytest.raises(UsageError, match=r"^--log-to .*/no/run: No such file or directory$"):
        ranks.logs(arguments(log=str(tmp_path / "no/run")))
