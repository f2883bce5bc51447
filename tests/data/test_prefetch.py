import gc
import queue
import threading
import time
import weakref

import pytest
import torch

from sparsekit.data import Prefetcher, prefetch


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "sparsekit-prefetch"]


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_order_is_kept_and_the_thread_ends(depth):
    items = Prefetcher(range(100), depth)
    assert list(items) == list(items) == list(range(100))
    assert list(Prefetcher([], depth)) == []
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_as_depth_are_read_ahead(depth):
    begun = []

    def source():
        for i in range(20):
            begun.append(i)
            yield i

    iterator = iter(Prefetcher(source(), depth))
    for i in range(10):
        assert next(iterator) == i
        deadline = time.monotonic() + 60
        while len(begun) < i + 1 + depth and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)  # time for the source to read one batch too many, if it does
        assert len(begun) == i + 1 + depth
    iterator.close()
    assert threads() == []


def test_an_error_comes_in_its_place():
    def source():
        yield 1
        yield 2
        raise OSError("the disk is gone")

    iterator = iter(Prefetcher(source()))
    assert next(iterator) == 1
    assert next(iterator) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)
    assert threads() == []


def test_what_cannot_be_iterated_over():
    with pytest.raises(TypeError, match="not iterable"):
        next(iter(Prefetcher(3)))
    with pytest.raises(ValueError, match=r"Prefetcher: depth must be in \[1, "):
        Prefetcher([], 0)
    with pytest.raises(TypeError, match="Prefetcher: list has no state_dict"):
        Prefetcher([]).state_dict()
    assert threads() == []


def test_a_thread_that_cannot_be_started_is_named(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        next(iter(Prefetcher([1])))


def test_leaving_early_ends_the_thread():
    for item in Prefetcher(iter(int, 1)):  # an endless source
        assert item == 0
        assert threads()[0].daemon  # a source that waits must not keep Python from ending
        break
    # Leaving the loop ends its iterator, and with it the thread.
    assert threads() == []


def test_a_source_is_freed_when_an_iteration_was_left():
    source = Source()
    freed = weakref.ref(source)
    for _ in Prefetcher(source):
        break
    assert threads() == []
    del source
    gc.collect()
    assert freed() is None


def test_batches_go_to_the_device():
    moved = list(Prefetcher([torch.ones(2), "text"], device="meta"))
    assert moved[0].device.type == "meta"
    assert moved[1] == "text"


def test_batches_go_to_a_gpu_through_pinned_memory():
    class Pinned(list):
        def pin_memory(self):
            return Pinned(["pinned", *self])

        def to(self, device, non_blocking=False):
            return Pinned([device.type, non_blocking, *self])

    source = [Pinned(["batch"])]
    assert list(Prefetcher(source, device="cuda")) == [["cuda", True, "pinned", "batch"]]
    assert list(Prefetcher(source, device="cpu")) == [["cpu", False, "batch"]]
    assert list(Prefetcher(source)) == [["batch"]]


class Source:
    """Source with a state; it yields 1, 2, 3, ..., each as soon as the test permits it."""

    def __init__(self, permits=100, error=None, batches=6):
        self.place, self.batches, self.error = 0, batches, error
        self.permits, self.blocked = threading.Semaphore(permits), threading.Event()

    def __iter__(self):
        while self.place < self.batches:
            if not self.permits.acquire(blocking=False):
                self.blocked.set()
                self.permits.acquire()
            self.place += 1
            yield self.place

    def state_dict(self):
        if self.error is not None:
            raise self.error
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


@pytest.mark.time_limit(30)
@pytest.mark.parametrize("batches", [3, 0])  # the error comes at the first batch, or at the end
def test_an_error_of_its_state_is_raised(batches):
    with pytest.raises(OSError, match="no state"):
        list(Prefetcher(Source(error=OSError("no state"), batches=batches)))
    assert threads() == []


def test_the_state_behind_an_error_is_that_of_the_last_batch():
    source = Source(batches=4)

    def broken():
        yield from source
        source.error = OSError("no state either")
        raise ValueError("broken")

    ahead = Prefetcher(type("Broken", (Source,), {"__iter__": lambda _: broken()})())
    ahead.batches.state_dict = source.state_dict
    with pytest.raises(ValueError, match="broken"):
        list(ahead)
    assert ahead.state_dict() == {"place": 4}


def test_the_state_behind_an_error_of_the_first_batch_is_the_sources_own():
    def broken(source):
        raise ValueError("broken")

    ahead = Prefetcher(type("Broken", (Source,), {"__iter__": broken})())
    with pytest.raises(ValueError, match="broken"):
        list(ahead)
    assert ahead.state_dict() == {"place": 0}


def test_a_source_is_not_begun_for_an_iteration_that_was_left():
    """The iteration ends while its thread waits to begin; the source must start no workers."""
    source = type("Begun", (), {"__iter__": lambda _: pytest.fail("it is begun")})()
    ready, ended = queue.SimpleQueue(), threading.Event()
    ended.set()
    Prefetcher(source)._read(ready, threading.Semaphore(1), ended)
    assert ready.empty()


@pytest.mark.time_limit(30)
def test_a_source_that_waits_is_left_and_its_place_is_not_mixed_up(monkeypatch):
    monkeypatch.setattr(prefetch, "_GRACE_S", 0.05)
    source = Source(permits=1)
    ahead = Prefetcher(source, depth=1)
    iterator = iter(ahead)
    assert next(iterator) == 1
    source.blocked.wait()
    iterator.close()  # returns although the source still waits
    assert ahead.state_dict() == {"place": 1}
    with pytest.raises(RuntimeError, match="Source still reads a batch of an iteration"):
        ahead.load_state_dict({"place": 0})
    another = iter(Prefetcher(source, depth=1))  # a trainer makes an iterator for each epoch
    source.permits.release(100)
    # The batch under way belongs to the abandoned iteration, so 2 is missing.
    assert list(another) == [3, 4, 5, 6]
    assert threads() == []
    ahead.load_state_dict({"place": 4})
    assert ahead.state_dict() == {"place": 4}
    assert list(ahead) == [5, 6]


def test_two_batches_are_read_ahead_unless_told_otherwise():
    assert Prefetcher([]).depth == 2
    assert Prefetcher([]).device is None
