"""``sparsekit profile`` profiles the right steps and reports them."""

import argparse
import contextlib
from types import SimpleNamespace

import pytest
import torch

from sparsekit.cli import first_steps
from sparsekit.cli.common import UsageError
from sparsekit.cli.first_steps import profile_fit

ARGS = argparse.Namespace(trace=None, steps=2, lines=3)


class Training:
    """A function that trains with two optimizers; `profiled` tells which steps were profiled."""

    def __init__(self, steps, error=None):
        self.steps, self.error, self.profiled = steps, error, []
        self.first, self.second = (
            torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1) for _ in range(2)
        )

    def __call__(self, data, args):
        for _ in range(self.steps):
            self.profiled.append(torch.autograd._profiler_enabled())
            self.first.step()
            self.second.step()
        if self.error is not None:
            raise self.error
        return 0


def test_the_steps_after_the_warm_up_are_profiled(capsys):
    training = Training(99)
    assert profile_fit(training, None, ARGS) == 0
    assert training.profiled == [False] * 3 + [True] * 2
    assert not torch.autograd._profiler_enabled()
    training(None, None)  # nothing ends training any more
    assert len(training.profiled) == 5 + 99
    assert "Trace" not in capsys.readouterr().out


def test_the_exit_code_of_training_that_was_interrupted():
    assert profile_fit(lambda data, args: 130, None, ARGS) == 130


@pytest.fixture
def profile(monkeypatch):
    """Replace the profiler; return the list of trace files that were requested."""
    asked = []

    @contextlib.contextmanager
    def profiled(trace):
        asked.append(trace)
        yield SimpleNamespace(ranks=4, bytes_moved=3000, table=lambda most: f"table of {most}")

    monkeypatch.setattr(first_steps, "profiled", profiled)
    return asked


@pytest.mark.parametrize("trace", [None, "x.json"])
def test_the_report(profile, capsys, monkeypatch, trace):
    args = argparse.Namespace(**{**vars(ARGS), "trace": trace})
    assert profile_fit(Training(99), None, args) == 0
    assert profile == [trace]
    assert capsys.readouterr().out.splitlines() == [
        *("", "2 steps on 4 rank(s), all ranks together:", "", "table of 3", ""),
        "A step moves 1,500 bytes from rank to rank.",
        *(["Trace: x.json"] if trace else []),
    ]
    monkeypatch.setattr(first_steps, "rank", lambda: 1)
    assert profile_fit(Training(99), None, args) == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("steps", [0, 2, 4])
def test_training_that_is_too_short(profile, steps):
    message = (
        rf"^training ended after {steps} steps, before the 5 of which --steps 2 are profiled: use "
        rf"fewer, or more epochs$"
    )
    with pytest.raises(UsageError, match=message):
        profile_fit(Training(steps), None, ARGS)


@pytest.mark.parametrize(
    ("error", "said"), [(OSError("odd"), "odd"), (OSError(28, "full"), "full")]
)
def test_traces_that_cannot_be_written(profile, error, said):
    args = argparse.Namespace(**{**vars(ARGS), "trace": "x.json"})
    with pytest.raises(UsageError, match=f"^--trace x.json: {said}$"):
        profile_fit(Training(3, error), None, args)
    training = Training(3, error)
    with pytest.raises(OSError, match=said):
        profile_fit(training, None, ARGS)
    training.error = None
    training(None, None)
    training(None, None)  # takes more steps than are profiled; nothing ends training


def test_a_trace_that_cannot_be_written_in_the_end(monkeypatch):
    @contextlib.contextmanager
    def profiled(trace):
        yield
        raise OSError(28, "full")

    monkeypatch.setattr(first_steps, "profiled", profiled)
    args = argparse.Namespace(**{**vars(ARGS), "trace": "x.json"})
    with pytest.raises(UsageError, match=r"^--trace x\.json: full$"):
        profile_fit(Training(5), None, args)
