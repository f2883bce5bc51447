"""``sparsekit scaling`` measures and predicts correctly; these tests start no ranks."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from sparsekit import cli
from sparsekit.cli import scaling
from sparsekit.cli.dispatch import make_parser
from sparsekit.train.scaling import Case

CASE = Case(tables=1, rows=9, dim=2, batch=4, epochs=1)


def test_defaults():
    args = make_parser().parse_args(["scaling"])
    assert (args.ranks, args.threads, args.json, args.plot) == ((1, 2), 1, None, None)
    case = Case()
    assert [getattr(args, name) for name in vars(case)] == list(vars(case).values())
    assert scaling.WORLDS == (8, 64, 512)


def test_ranks_are_measured_in_processes_of_their_own(monkeypatch):
    asked = []

    def run(ranks, function, *arguments):
        asked.append((ranks, function, *arguments[:2]))
        Path(arguments[2]).write_text("12.5")

    monkeypatch.setattr(scaling, "run_on_ranks", run)
    assert scaling._measure(3, CASE, 2) == 12.5
    assert asked == [(3, scaling._run_as_rank, CASE, 2)]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_tells_the_rate_before_any_rank_leaves(monkeypatch, tmp_path, rank):
    calls, file = [], tmp_path / "rate"
    monkeypatch.setattr(scaling, "start_rank", lambda: calls.append("start"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: calls.append(threads))
    monkeypatch.setattr(dist, "init_process_group", calls.append)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append(file.exists()))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("end"))
    monkeypatch.setattr(scaling, "samples_per_second", lambda case: calls.append(case) or 0.1)
    monkeypatch.setattr(scaling, "rank", lambda: rank)
    scaling._run_as_rank(CASE, 3, str(file))
    assert calls == ["start", 3, "gloo", CASE, rank == 0, "end"]
    assert rank or float(file.read_text()) == 0.1


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({}, "no prediction: no two of these worlds had a core for each thread"),
        ({1: 10.0}, "no prediction: no two of these worlds had a core for each thread"),
        ({1: 10.0, 2: 20.0}, "no prediction: 2 ranks lost no time that could be extrapolated"),
        ({1: 10.0, 2: 21.0}, "no prediction: 2 ranks lost no time that could be extrapolated"),
        ({1: 10.0, 2: 19.9, 3: 30.0}, "no prediction: 3 ranks lost no time"),
        ({1: 10.0, 2: 20.0, 4: 30.0}, "Predicted from 1 and 4 ranks, not measured:"),
    ],
)
def test_what_can_be_predicted(capsys, measured, said):
    forecast = scaling._forecast(measured)
    assert f"\n{said}" in capsys.readouterr().out
    assert list(forecast) == ([8, 64, 512] if said.startswith("Pred") else [])


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(scaling, "_measure", lambda ranks, case, threads: 10.0 * ranks**0.5)
    monkeypatch.setattr(scaling.os, "sched_getaffinity", lambda pid: set(range(4)))


def test_worlds_with_more_threads_than_cores_do_not_count(measured, tmp_path, capsys):
    file = tmp_path / "x.json"
    command = ["scaling", "--ranks", "1,2,3", "--threads", "2", "--json", str(file)]
    assert cli.main(command) == 0
    output = capsys.readouterr().out
    assert [line.endswith("(more than cores)") for line in output.splitlines()[3:6]] == [
        False, False, True
    ]  # fmt: skip
    assert "Predicted from 1 and 2 ranks" in output
    assert file.read_text().endswith("}\n")
    assert json.loads(file.read_text())["threads"] == 2


def test_figures_that_cannot_be_written(measured, tmp_path, monkeypatch, capsys):
    for option in ("--json", "--plot"):
        assert cli.main(["scaling", "--ranks", "1", option, "no/x"]) == 2
        printed, error = capsys.readouterr()
        assert f"{option} no/x: cannot write into" in error
        assert printed == ""

    def fail(*_):
        raise OSError(28, "full")

    monkeypatch.setattr(Path, "write_text", fail)
    monkeypatch.setattr(scaling, "plot_scaling", fail)
    for option in ("--json", "--plot"):
        file = str(tmp_path / "x")
        assert cli.main(["scaling", "--ranks", "1", option, file]) == 2
        assert capsys.readouterr().err == f"sparsekit: {option} {file}: full\n"


def test_the_plot_has_the_measured_and_the_predicted(measured, tmp_path, monkeypatch):
    plotted = []
    monkeypatch.setattr(scaling, "plot_scaling", lambda *given: plotted.append(given))
    file = str(tmp_path / "x.png")
    assert cli.main(["scaling", "--plot", file]) == 0
    ((rates, forecast, path),) = plotted
    assert rates == {1: 10.0, 2: pytest.approx(14.142, rel=1e-3)}
    assert list(forecast) == [8, 64, 512]
    assert path == file
