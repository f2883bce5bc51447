"""Tests of errors' exit codes and messages, and of ``sparsekit plot`` and ``sparsekit bench``."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparsekit import cli
from sparsekit._extras import MissingPackageError
from sparsekit.cli import bench, dispatch, info, plot
from sparsekit.cli.common import UsageError
from sparsekit.datasets import DatasetUnavailableError, RatingsFormatError
from sparsekit.errors import CheckpointError, DataFormatError, DivergedError, ResumeError
from sparsekit.train.config import ConfigError
from sparsekit.train.launch import RankError


def failing(error):
    def fail(*_):
        raise error

    return fail


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        *(
            (kind("why: x"), 2, "sparsekit: why: x\n")
            for kind in (
                UsageError, DatasetUnavailableError, RatingsFormatError, DataFormatError,
                CheckpointError, ResumeError, MissingPackageError, ConfigError,
            )
        ),
        (DivergedError("why: x"), 1, "sparsekit: why: x\n"),
        (
            RankError(1, SimpleNamespace(exitcode=3, message="")),
            1,
            "sparsekit: rank 1 ended with exit code 3\n",
        ),
        (KeyboardInterrupt(), 130, "sparsekit: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)  # fmt: skip
def test_errors_have_an_exit_code_and_a_line(monkeypatch, capsys, error, code, said):
    discarded = []
    monkeypatch.setattr(info, "build_info", failing(error))
    monkeypatch.setattr(dispatch, "discard_output", lambda: discarded.append(True))
    assert cli.main(["info"]) == code
    assert capsys.readouterr() == ("", said)
    assert discarded == [True] * (code == 141)


def test_a_command_decides_on_the_exit_code(monkeypatch):
    monkeypatch.setattr(info, "_info", lambda args: 7)
    assert cli.main(["info"]) == 7


def test_other_errors_pass(monkeypatch):
    monkeypatch.setattr(info, "build_info", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["info"])


def test_arguments_are_those_of_the_process_unless_others_are_given(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["sparsekit", "info"])
    monkeypatch.setattr(info, "build_info", lambda: {"a": 1})
    assert cli.main() == 0
    assert capsys.readouterr().out == "a: 1\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        cli.main([])
    assert "required: COMMAND" in capsys.readouterr().err


def test_an_option_may_be_abbreviated(capsys):
    with pytest.raises(SystemExit, match=r"^0$"):
        cli.main(["--vers"])
    assert capsys.readouterr().out.startswith("sparsekit ")


def test_plot(monkeypatch, capsys):
    drawn = []
    monkeypatch.setattr(plot, "plot_run", lambda *arguments: drawn.append(arguments))
    assert cli.main(["plot", "run"]) == cli.main(["plot", "run", "--out", "x.png"]) == 0
    assert drawn == [("run", Path("run/plot.png")), ("run", Path("x.png"))]
    assert capsys.readouterr().out == "run/plot.png\nx.png\n"
    assert cli.main(["plot", "run", "--out", "no/x.png"]) == 2
    assert len(drawn) == 2
    assert "--out no/x.png: cannot write into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MissingPackageError("plot needs matplotlib"), "plot needs matplotlib"),
        (ValueError("x:1: no record"), "x:1: no record"),
        (OSError(28, "No space left on device", "run/x.png"), "run/x.png: No space left on device"),
        (OSError("odd"), "run: odd"),
    ],
)
def test_runs_that_cannot_be_drawn(monkeypatch, capsys, error, said):
    monkeypatch.setattr(plot, "plot_run", failing(error))
    assert cli.main(["plot", "run"]) == 2
    assert capsys.readouterr() == ("", f"sparsekit: {said}\n")


@pytest.mark.parametrize("installed", [True, False])
def test_benchmarks_of_the_clone_or_else_of_the_current_folder(monkeypatch, tmp_path, installed):
    folders = [tmp_path / "clone", tmp_path / "here"]
    for folder in folders[not installed :]:
        (folder / "benchmarks").mkdir(parents=True)
        (folder / "benchmarks/bench_hash_table.py").touch()
    monkeypatch.setattr(bench, "__file__", str(folders[0] / "sparsekit/cli/bench.py"))
    monkeypatch.chdir(folders[1])
    monkeypatch.setattr(sys, "path", before := ["first"])
    called = SimpleNamespace(main=lambda arguments, prog: (arguments, prog))
    monkeypatch.setattr(importlib, "import_module", {"benchmarks.__main__": called}.__getitem__)
    assert cli.main(["bench", "run", "x"]) == (["run", "x"], "sparsekit bench")
    assert before == ["first", str(folders[not installed])]
