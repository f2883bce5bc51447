"""The thread that watches a communicator survives errors."""

import sys

import pytest

from sparsekit.distributed.watch import Watch

from .fake import launch


class Recorder:
    """Communicator that records its calls."""

    def __init__(self, *errors):
        self.errors, self.said = list(errors), []

    def check(self):
        if self.errors:
            raise self.errors.pop(0)

    def abort(self, reason):
        self.said.append(reason)

    def destroy(self):
        self.said.append("destroyed")


def looked_after(monkeypatch, communicator, finished, launched=True):
    """Return the communicator's calls and the output on stderr."""
    monkeypatch.setattr("sparsekit.distributed.watch._INTERVAL", 0.01)
    watch = Watch(communicator, 0.0, finished)
    if launched:
        launch(watch)
    watch.start()
    watch.join(10)
    assert not watch.is_alive()
    return communicator.said


def broken(error):
    def finished():
        raise error

    return finished


@pytest.mark.parametrize("error", [RuntimeError("CUDA error"), ValueError("?"), MemoryError()])
def test_a_device_that_cannot_tell_is_given_up(monkeypatch, capfd, error):
    (reason,) = looked_after(monkeypatch, Recorder(), broken(error))
    assert type(error).__name__ in reason
    assert str(error) in reason
    assert reason in capfd.readouterr().err


def test_a_check_that_raises_anything_else_is_given_up(monkeypatch, capfd):
    (reason,) = looked_after(monkeypatch, Recorder(MemoryError("none")), bool, launched=False)
    assert "MemoryError: none" in reason
    assert reason in capfd.readouterr().err


def test_a_communicator_that_is_no_more_needs_no_look(monkeypatch):
    assert looked_after(monkeypatch, Recorder(RuntimeError("no more")), bool, False) == []


def test_no_stderr_to_write_to(monkeypatch):
    monkeypatch.setattr(sys, "stderr", broken_stream())
    (reason,) = looked_after(monkeypatch, Recorder(), lambda: False)
    assert "has not ended within 0 s" in reason


class broken_stream:
    def write(self, text):
        raise ValueError("closed")


def test_a_call_that_has_not_returned_is_not_through(monkeypatch):
    """A call still counts as running even if the event of an earlier launch has finished."""
    monkeypatch.setattr("sparsekit.distributed.watch._INTERVAL", 0.01)
    communicator = Recorder()
    watch = Watch(communicator, 0.0, lambda: True)
    with watch.launch():
        watch.start()
        watch.join(10)
    assert not watch.is_alive()
    assert "has not ended" in communicator.said[0]


@pytest.mark.parametrize(
    ("finished", "reason", "said"),
    [
        (lambda: True, "", "destroyed"),
        (lambda: True, "an exception", "an exception"),
        (lambda: False, "", "it was closed while an exchange was under way"),
        (broken(RuntimeError("CUDA error")), "", "RuntimeError: CUDA error"),
        (broken(MemoryError("none")), "", "MemoryError: none"),
    ],
)
def test_the_end_waits_for_kernels_but_not_for_ever(monkeypatch, finished, reason, said):
    monkeypatch.setattr("sparsekit.distributed.watch._PATIENCE", 0.1)
    communicator = Recorder()
    watch = Watch(communicator, 60.0, finished)
    watch.start()
    launch(watch)
    watch.close(reason)
    watch.close(reason)
    assert not watch.is_alive()
    (told,) = communicator.said
    assert said in told


def test_a_launch_that_has_finished_is_looked_at_no_more():
    looks = []

    def finished():
        looks.append(None)
        return True

    watch = Watch(Recorder(), 0.0, finished)
    for launches in (1, 2):
        launch(watch)
        assert [watch._look() for _ in range(3)] == [None] * 3
        assert len(looks) == launches
        assert watch._through()
        assert len(looks) == launches


def test_the_thread_itself_may_close_it(monkeypatch):
    """The watching thread may close its own watch, since garbage collection may run on it."""
    monkeypatch.setattr("sparsekit.distributed.watch._INTERVAL", 0.01)
    communicator = Recorder()
    watch = Watch(communicator, 60.0, lambda: True)
    communicator.check = lambda: watch.close("collected")
    watch.start()
    watch.join(10)
    assert not watch.is_alive()
    assert communicator.said == ["collected"]


def test_a_launch_that_begins_during_a_look_has_its_own_time():
    watch = Watch(Recorder(), 0.0, lambda: launch(watch))
    launch(watch)
    assert watch._look() is None


def test_a_call_that_still_launches_is_not_through():
    watch = Watch(Recorder(), 60.0, lambda: True)
    with watch.launch():
        assert not watch._through()
    assert watch._through()


def test_a_communicator_that_was_aborted_needs_no_end():
    communicator = Recorder()
    communicator.destroy = broken(RuntimeError("it has been aborted"))
    Watch(communicator, 60.0, lambda: True)._end()
    assert communicator.said == []


def test_the_thread_does_not_keep_the_process():
    assert Watch(Recorder(), 60.0, lambda: True).daemon
