"""The launcher starts ranks and reports their errors."""

import atexit
import logging
import os
import signal
import time

import pytest
import torch.distributed as dist

from sparsekit.train.launch import RankError, run_on_ranks, start_rank

# Signals for which the launcher installs handlers.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def leave_a_file(folder):
    start_rank()
    dist.init_process_group("gloo")
    # If a rank exited immediately, it would break connections that a slower rank is still making.
    dist.barrier()
    (folder / f"{dist.get_rank()} of {dist.get_world_size()}").touch()
    dist.destroy_process_group()


def test_function_is_called_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(logging.root.manager, "disable", logging.DEBUG)
    handlers = list(map(signal.getsignal, HANDLED))
    run_on_ranks(2, leave_a_file, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"0 of 2", "1 of 2"}
    assert list(map(signal.getsignal, HANDLED)) == handlers
    assert logging.root.manager.disable == logging.DEBUG
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def fail(how):
    start_rank()
    if os.environ["RANK"] != "1":
        time.sleep(600)
    if how == "raise":
        raise ValueError("wrong: the second")
    os.kill(os.getpid(), signal.SIGKILL)


def test_an_error_of_one_rank_ends_all(capfd):
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, fail, "raise")
    error = caught.value
    assert (error.rank, error.kind, error.reason) == (1, "ValueError", "wrong: the second")
    assert str(error).startswith("rank 1 failed\nTraceback")
    assert "in fail" in str(error)
    assert capfd.readouterr() == ("", "")


def fail_first_and_end_last(folder):
    start_rank()
    raised = folder / "raised"
    if os.environ["RANK"] == "1":
        atexit.register(time.sleep, 600)
        raised.touch()
        raise ValueError("the first")
    while not raised.exists():
        time.sleep(0.01)
    time.sleep(1)
    raise RuntimeError("what came of it")


def test_the_error_that_came_first_counts(tmp_path):
    with pytest.raises(RankError) as caught:
        run_on_ranks(2, fail_first_and_end_last, tmp_path)
    error = caught.value
    assert (error.rank, error.kind, error.reason) == (1, "ValueError", "the first")


def test_a_rank_that_is_killed(capfd):
    with pytest.raises(RankError, match=r"^rank 1 was ended by SIGKILL$"):
        run_on_ranks(2, fail, "kill")
    assert capfd.readouterr() == ("", "")
