"""Limits of time for what waits for other ranks: a thread is left behind, or frees the other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

# Seconds between two looks at a communicator, and for which its end may take.
_INTERVAL, _PATIENCE = 1.0, 10.0


class Communicator(Protocol):
    """The communicator that is watched: `_pybind.NcclCommunicator`."""

    def check(self) -> None:
        """Raise RuntimeError if it has been aborted, by an error of its own for example."""

    def abort(self, reason: str) -> None:
        """Free it, and all that waits in it; nothing if it is no more."""

    def destroy(self) -> None:
        """Wait for what is under way, then free it."""


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """The result of a call that nothing can end, on a thread that is left behind if it has to be.

    Raises:
        RuntimeError: it has not returned in time.
        And what it raises.
    """
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name="sparsekit-connect", daemon=True).start()
    try:
        return outcome.result(seconds)
    except concurrent.futures.TimeoutError:
        raise RuntimeError(f"sparsekit: {what} {_late(seconds)}") from None


class Watch(threading.Thread):
    """Looks after a communicator while a kernel or a call waits for other ranks, and ends it.

    The host may be waiting for that kernel, which ends only when the communicator is aborted:
    after an error on the network, or when the last launch is not through in time.

    Args:
        communicator: what is looked after.
        seconds: for which a launch may last.
        finished: whether the last launch is through.
    """

    def __init__(
        self, communicator: Communicator, seconds: float, finished: Callable[[], bool]
    ) -> None:
        super().__init__(name="sparsekit-nccl", daemon=True)
        self._communicator = communicator
        self._seconds = seconds
        self._finished = finished
        # By when the last launch must be through, and whether its call has not yet returned.
        self._deadline: float | None = None
        self._launching = False
        self._settled: float | None = None  # the deadline that needs no more looks
        self._over = threading.Event()
        self._reason = ""

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """In here something is launched that is waited for from now on."""
        self._launching = True
        self._deadline = time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._launching = False

    def close(self, reason: str = "") -> None:
        """End the communicator and the thread; with a reason, without waiting for other ranks."""
        self._reason = reason
        self._over.set()
        if threading.current_thread() is not self:  # as the garbage collector may be
            # An end that takes even longer is left behind.
            self.join(2 * _PATIENCE)

    def run(self) -> None:
        """Look, until told to stop or until there is nothing left to look after."""
        reason = None
        while reason is None and not self._over.wait(_INTERVAL):
            try:
                self._communicator.check()
            except RuntimeError:
                return  # it is no more
            except Exception as error:
                reason = _said_by(error)
            else:
                reason = self._look()
        if reason is None:
            self._end()
            return
        # What the kernel leaves behind is not what it should have received. The next exchange
        # raises, but there need not be one.
        self._communicator.abort(reason)
        with contextlib.suppress(Exception):  # there may be no stderr
            print(f"sparsekit: {reason}", file=sys.stderr, flush=True)

    def _look(self) -> str | None:
        """Why the communicator must go, if it must."""
        deadline = self._deadline
        if deadline in (None, self._settled) or time.monotonic() < deadline:
            return None
        # Asked as late as this, because a question would spoil a graph that is being captured.
        try:
            if not self._launching and self._finished():
                self._settled = deadline
                return None
        except Exception as error:
            # A device that cannot tell is out of order, and a rank may be waiting for it.
            return _said_by(error)
        if deadline != self._deadline:
            return None  # another launch has come between
        return f"an exchange {_late(self._seconds)}"

    def _end(self) -> None:
        reason = self._reason
        try:
            end = time.monotonic() + _PATIENCE
            # To destroy it waits for kernels without a limit.
            while not reason and not self._through():
                time.sleep(0.01)
                if time.monotonic() > end:
                    reason = "it was closed while an exchange was under way"
        except Exception as error:
            reason = _said_by(error)
        if reason:
            self._communicator.abort(reason)
        else:
            with contextlib.suppress(RuntimeError):  # it has been aborted then, which is as good
                self._communicator.destroy()

    def _through(self) -> bool:
        if self._deadline in (None, self._settled):
            return True
        return not self._launching and self._finished()


def _late(seconds: float) -> str:
    return f"has not ended within {seconds:g} s; another rank may be gone"


def _said_by(error: Exception) -> str:
    return f"the communicator cannot be looked after: {type(error).__name__}: {error}"
