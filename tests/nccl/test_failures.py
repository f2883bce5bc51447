"""Over a stand-in for libnccl, the native exchange raises if calls fail or ranks are missing."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

from sparsekit import _pybind
from sparsekit.distributed import nccl
from sparsekit.distributed.watch import Watch

from .fake import CPU, LONG, SHORT, calls, launch, on_threads, one_rank, the_fake

INTERNAL_ERROR = 3


def raises(function, *parts):
    with pytest.raises(RuntimeError) as caught:
        function()
    for part in parts:
        assert part in str(caught.value)


def fail_once(rank, function):
    fake, before = the_fake(), the_fake().fake_aborted()
    parts = (f"{function}: internal error: as the test has asked",)
    if function in ("ncclGetUniqueId", "ncclCommInitRankConfig"):
        fake.fake_fail(function.encode(), INTERNAL_ERROR)
        raises(one_rank, *parts)
        return fake.fake_aborted() - before
    transport = one_rank()
    fake.fake_fail(function.encode(), INTERNAL_ERROR)
    if function in ("ncclCommFinalize", "ncclCommDestroy"):
        raises(transport.communicator.destroy, *parts)
        return fake.fake_aborted() - before
    ones = torch.ones(4)
    raises(lambda: transport.all_to_all(ones, [4], [4]), *parts)
    # The communicator was aborted, and later errors give the original reason.
    raises(lambda: transport.all_to_all(ones, [4], [4]), "is no more", *parts)
    transport.close()
    # A failed group does not affect the next group.
    assert torch.equal(one_rank().all_to_all(ones, [4], [4]), ones)
    return fake.fake_aborted() - before


@pytest.mark.parametrize(
    ("function", "aborted"),
    [
        ("ncclGetUniqueId", 0),
        ("ncclCommInitRankConfig", 0),
        ("ncclGroupStart", 1),
        ("ncclSend", 1),
        ("ncclRecv", 1),
        ("ncclGroupEnd", 1),
        ("ncclCommFinalize", 1),
        ("ncclCommDestroy", 0),
    ],
)
def test_a_call_that_fails(fake, function, aborted):
    assert fake(fail_once, function) == aborted
    assert fake(alive) == 0


def alive(rank):
    gc.collect()
    return the_fake().fake_alive()


def fail_to_connect(rank):
    for function in ("ncclGroupStart", "ncclSend", "ncclRecv", "ncclGroupEnd"):
        the_fake().fake_fail(function.encode(), INTERNAL_ERROR)
        raises(one_rank, f"{function}: internal error")


def test_a_first_message_that_fails(fake):
    fake(fail_to_connect)
    assert fake(alive) == 0


def async_error(rank):
    transport = one_rank()
    the_fake().fake_async_error(INTERNAL_ERROR)
    raises(lambda: transport.all_to_all(torch.ones(1), [1], [1]), "ncclGroupEnd: internal error")


def async_error_at_init(rank):
    the_fake().fake_async_error(INTERNAL_ERROR)
    raises(one_rank, "ncclGroupEnd: internal error")


def async_error_while_waiting(rank):
    """Only the thread that watches the communicator can see this error."""
    transport = one_rank()
    the_fake().fake_async_error(INTERNAL_ERROR)
    before = the_fake().fake_aborted()
    end = time.monotonic() + 60
    while the_fake().fake_aborted() == before and time.monotonic() < end:
        time.sleep(0.05)
    assert the_fake().fake_aborted() == before + 1
    raises(lambda: transport.all_to_all(torch.ones(1), [1], [1]), "is no more", "internal error")


def different_sizes(rank):
    def exchange(transport):
        return transport.all_to_all(torch.ones(3), [1, 2], [1, transport.rank + 1])

    raises(lambda: on_threads(2, exchange), "ncclGroupEnd: other error")


@pytest.mark.parametrize(
    "function", [async_error, async_error_at_init, async_error_while_waiting, different_sizes]
)
def test_an_error_that_comes_later(fake, function):
    fake(function)
    assert fake(alive) == 0


def absent_at_init(rank):
    unique_id = _pybind.NcclCommunicator.unique_id()
    raises(lambda: nccl.NcclTransport(0, 2, unique_id, CPU, SHORT), "within 1 s; another rank")


def absent_later(rank):
    unique_id = _pybind.NcclCommunicator.unique_id()
    comes = threading.Thread(target=nccl.NcclTransport, args=(1, 2, unique_id, CPU, LONG))
    comes.start()
    transport = nccl.NcclTransport(0, 2, unique_id, CPU, SHORT)
    comes.join()
    raises(lambda: transport.all_to_all(torch.ones(2), [1, 1], [1, 1]), "within 1 s; another")


def new_communicator():
    return _pybind.NcclCommunicator(0, 1, _pybind.NcclCommunicator.unique_id())


def kernel_that_does_not_end(rank):
    communicator = new_communicator()
    asked = []
    watch = Watch(communicator, 0.1, lambda: asked.append(time.monotonic()) or len(asked) < 3)
    for _ in range(2):  # these two collectives end in time
        launch(watch)
        if not watch.is_alive():
            watch.start()
        time.sleep(2.5)
        communicator.check()
    assert len(asked) == 2
    launch(watch)
    watch.join(60)
    assert not watch.is_alive()
    raises(communicator.check, "an exchange has not ended within 0.1 s; another rank may be gone")


@pytest.mark.parametrize("function", [absent_at_init, absent_later, kernel_that_does_not_end])
def test_a_rank_that_does_not_come(fake, function):
    begin = time.monotonic()
    fake(function)
    assert fake(alive) == 0
    assert time.monotonic() - begin < 50


# Calls that wait in NCCL until an abort ends them.


def abort_during_a_call(rank):
    """The other rank never makes its call, and a third thread aborts the wait."""
    unique_id = _pybind.NcclCommunicator.unique_id()
    other = threading.Thread(target=nccl.NcclTransport, args=(1, 2, unique_id, CPU, LONG))
    other.start()
    transport = nccl.NcclTransport(0, 2, unique_id, CPU, LONG)
    other.join()
    gc.collect()  # frees the other thread's communicator
    said = calls()
    messages = []

    def call():
        try:
            transport.all_to_all(torch.ones(2), [1, 1], [1, 1])
        except RuntimeError as error:
            messages.append(str(error))

    blocked = threading.Thread(target=call)
    blocked.start()
    begin = time.monotonic()
    while "ncclGroupEnd" not in (said := calls()) and time.monotonic() < begin + 30:
        time.sleep(0.01)
    transport.communicator.check()  # does not wait for the call in the other thread
    assert blocked.is_alive()
    transport.communicator.abort("no longer wanted")
    blocked.join(30)
    assert not blocked.is_alive()
    assert time.monotonic() - begin < 30
    said = [call for call in calls() if "Abort" in call or "Revoke" in call]
    return messages, said


NO_MORE = "sparsekit: the NCCL communicator is no more: no longer wanted"


def test_an_abort_frees_a_thread_that_waits_in_a_group(fake):
    messages, said = fake(abort_during_a_call)
    assert messages == [NO_MORE]
    # NCCL requires that no thread is in a call that is aborted, so a revoke comes first.
    assert said == ["ncclCommRevoke", "ncclCommAbort"]
    assert fake(alive) == 0


def test_an_abort_by_an_old_library(old_fake):
    messages, said = old_fake(abort_during_a_call)
    assert messages == [NO_MORE]
    assert said == ["ncclCommAbort", "ncclCommAbort during a call"]


def wrong_arguments(rank):
    transport = one_rank()
    ones = torch.ones(4)
    for send, splits in ((ones, [3]), (ones.view(2, 2).T, [4])):
        with pytest.raises(ValueError, match="contiguous and hold the"):
            transport.all_to_all(send, splits, [4])
    with pytest.raises(ValueError, match="on meta, the communicator on cpu"):
        transport.all_to_all(ones.to("meta"), [4], [4])
    communicator = transport.communicator
    for sizes, message in (([1, 2], "for each of 1 ranks, got 2"), ([-1], "negative")):
        with pytest.raises(ValueError, match=message):
            communicator.all_to_all(0, sizes, 0, [0], 0)
        with pytest.raises(ValueError, match=message):
            communicator.all_to_all(0, [0], 0, sizes, 0)
    with pytest.raises(ValueError, match="unique_id must have 128 bytes, got 2"):
        _pybind.NcclCommunicator(0, 1, b"ab")
    # These errors have not harmed the transport.
    assert torch.equal(transport.all_to_all(ones, [4], [4]), ones)


def test_wrong_arguments(fake):
    fake(wrong_arguments)


def ends(rank):
    calls()
    transport = one_rank()
    transport.close()
    transport.close()
    raises(transport.communicator.check, "is no more: it has been destroyed")
    one_rank()  # closed by the garbage collector
    # This communicator has no transport to close it.
    new_communicator()
    communicator = one_rank().communicator
    communicator.abort("no longer wanted")
    return [call for call in calls() if call.startswith("ncclComm")]


def test_the_end_of_a_communicator(fake):
    begin, destroyed = "ncclCommInitRankConfig", ["ncclCommFinalize", "ncclCommDestroy"]
    aborted = "ncclCommAbort"
    # The last transport is destroyed before its communicator is aborted.
    expected = [begin, *destroyed, begin, *destroyed, begin, aborted, begin, *destroyed]
    assert fake(ends) == expected


PROGRAM = """
from datetime import timedelta
import torch
from sparsekit import _pybind
from sparsekit.distributed.nccl import NcclTransport

unique_id = _pybind.NcclCommunicator.unique_id()
kept = NcclTransport(0, 1, unique_id, torch.device("cpu"), timedelta(seconds=9))
"""


@pytest.mark.parametrize(
    ("last_line", "expected"),
    [("", ["ncclCommFinalize", "ncclCommDestroy"]), ("raise KeyError", ["ncclCommAbort"])],
)
def test_the_end_of_a_process(fake, last_line, expected):
    environment = {
        **os.environ,
        "SPARSEKIT_NCCL_LIBRARY": str(fake.library),
        "FAKE_NCCL_TALKS": "1",
    }
    command = [sys.executable, "-c", PROGRAM + last_line]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == bool(last_line), done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("ncclComm")]
    assert said == ["ncclCommInitRankConfig", *expected]
