import threading
import time

import pytest
import torch

from sparsekit.data import Prefetcher


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
        time.sleep(0.02)  # for one too many
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


def test_leaving_early_ends_the_thread():
    for item in Prefetcher(iter(int, 1)):  # endless
        assert item == 0
        break
    # The loop's iterator is gone with the loop.
    assert threads() == []


def test_batches_go_to_the_device():
    moved = list(Prefetcher([torch.ones(2), "text"], device="meta"))
    assert moved[0].device.type == "meta"
    assert moved[1] == "text"
