"""A thread calls its function once or never, and `cancel` tells which of the two."""

import threading

import pytest

from sparsekit.checkpoint.task import Task


class Late:
    """Stand-in for a thread that the system has started but not yet run."""

    def start(self):
        pass


def test_a_function_whose_start_has_returned_is_called():
    calls = []
    task = Task(lambda: calls.append(1), "late")
    task._thread = Late()
    task.start()
    assert not task.cancel()
    assert not task.done()
    task._run()
    assert calls == [1]
    assert task.done()


def test_a_function_that_was_given_up_is_never_called():
    """If `start` was interrupted, the thread may still run, but it must not call the function."""
    task = Task(lambda: pytest.fail("it is called"), "late")
    assert not task.done()
    assert task.cancel()
    assert task.cancel()
    assert task.done()
    task._run()
    task.wait()


@pytest.mark.time_limit(30)
def test_a_wait_ends_with_the_function():
    begun, go_on, ended = threading.Event(), threading.Event(), []

    def function():
        begun.set()
        go_on.wait()
        ended.append(threading.current_thread())

    task = Task(function, "worker", daemon=True)
    task.start()
    begun.wait()
    assert not task.done()
    assert not task.cancel()
    go_on.set()
    task.wait()
    task.wait()
    (thread,) = ended
    assert (thread.name, thread.daemon) == ("worker", True)
    assert not Task(function, "x")._thread.daemon


@pytest.mark.time_limit(30)
def test_a_wait_does_not_poll(monkeypatch):
    monkeypatch.setattr("sparsekit.checkpoint.task._LOOK", 1000.0)
    begun, go_on = threading.Event(), threading.Event()
    task = Task(lambda: (begun.set(), go_on.wait()), "worker", daemon=True)
    task.start()
    begun.wait()
    threading.Timer(0.05, go_on.set).start()
    task.wait()
