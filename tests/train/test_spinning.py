"""A hint is given if threads spin while they wait for one another on shared cores."""

import pytest
import torch

from sparsekit.train import spinning
from sparsekit.train.spinning import Spinning


@pytest.fixture
def clock(monkeypatch):
    now = {"seconds": 1000.0, "switches": 500}
    monkeypatch.setattr(spinning, "_now", lambda: tuple(now.values()))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for name in spinning.CHOSEN:
        monkeypatch.delenv(name, raising=False)
    return now


@pytest.mark.parametrize(
    ("seconds", "switches", "told"),
    [(5.0, 200, True), (5.0, 199, False), (4.9, 10_000, False), (50.0, 2000, True)],
)
def test_a_hint_needs_seconds_and_switches(clock, seconds, switches, told):
    measured = Spinning()
    clock["seconds"] += seconds
    clock["switches"] += switches
    said = measured.hint()
    assert ("torch's 4 threads spin" in said) == bool(said) == told


def test_a_hint_is_of_the_epoch_and_given_once(clock):
    measured = Spinning()
    clock["switches"] += 10_000
    measured.begin()
    clock["seconds"] += 10
    assert measured.hint() == ""
    clock["switches"] += 10_000
    assert measured.hint()
    assert measured.hint() == ""


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", ""])
@pytest.mark.parametrize("threads", [1, 4])
def test_no_hint_where_threads_do_not_spin(clock, monkeypatch, name, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    if name:
        monkeypatch.setenv(name, "")
    measured = Spinning()
    clock["seconds"] += 10
    clock["switches"] += 10_000
    assert bool(measured.hint()) == (not name and threads == 4)
