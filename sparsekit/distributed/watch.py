"""Time limits for calls and kernels that wait for other ranks."""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

T = TypeVar("T")

# Interval between two checks of a communicator, and time limit for closing it, in seconds.
_INTERVAL, _PATIENCE = 1.0, 10.0


class Communicator(Protocol):
    """The methods of `_pybind.NcclCommunicator` that `Watch` calls."""

    def check(self) -> None:
        """Raise RuntimeError if the communicator has been aborted, for example after an error."""

    def abort(self, reason: str) -> None:
        """Abort the communicator and everything that waits in it; do nothing if it is closed."""

    def destroy(self) -> None:
        """Wait for work in progress, then free the communicator."""


def within(seconds: float, call: Callable[[], T], what: str) -> T:
    """Run a call on another thread and return its result, or raise an error if it takes too long.

    Raises:
        RuntimeError: the call has not returned in time; its thread is left running. The call may
            raise further errors.
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
    """A thread that aborts a communicator if a kernel or a call waits too long for other ranks.

    The host may be waiting for a kernel that ends only when the communicator is aborted. The thread
    aborts the communicator after a network error, or if the last launch does not finish in time.

    Args:
        communicator: the communicator to watch.
        seconds: time limit for a launch.
        finished: returns whether the last launch has finished.
    """

    def __init__(
        self, communicator: Communicator, seconds: float, finished: Callable[[], bool]
    ) -> None:
        super().__init__(name="sparsekit-nccl", daemon=True)
        self._communicator = communicator
        self._seconds = seconds
        self._finished = finished
        # Time by which the last launch must have finished, and whether the launching call is still
        # running.
        self._deadline: float | None = None
        self._launching = False
        self._settled: float | None = None  # `_deadline` of the last launch known to have finished
        self._over = threading.Event()
        self._reason = ""

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """Watch the launch made in the ``with`` body."""
        self._launching = True
        self._deadline = time.monotonic() + self._seconds
        try:
            yield
        finally:
            self._launching = False

    def close(self, reason: str = "") -> None:
        """Close the communicator and end the thread; given a reason, abort instead of waiting."""
        self._reason = reason
        self._over.set()
        if threading.current_thread() is not self:  # the garbage collector may run on this thread
            # Wait with a time limit, in case the thread hangs.
            self.join(2 * _PATIENCE)

    def run(self) -> None:
        """Check the communicator until `close` is called or the communicator is gone."""
        reason = None
        while reason is None and not self._over.wait(_INTERVAL):
            try:
                self._communicator.check()
            except RuntimeError:
                return  # the communicator is gone
            except Exception as error:
                reason = _said_by(error)
            else:
                reason = self._look()
        if reason is None:
            self._end()
            return
        # An aborted kernel leaves wrong data behind. The next exchange raises an error, but there
        # may be no next exchange, so print the reason now.
        self._communicator.abort(reason)
        with contextlib.suppress(Exception):  # there may be no stderr
            print(f"sparsekit: {reason}", file=sys.stderr, flush=True)

    def _look(self) -> str | None:
        """Return the reason to abort the communicator, or None if there is none."""
        deadline = self._deadline
        if deadline in (None, self._settled) or time.monotonic() < deadline:
            return None
        # Query the device only after the deadline, since a query invalidates a graph being
        # captured.
        try:
            if not self._launching and self._finished():
                self._settled = deadline
                return None
        except Exception as error:
            # A device that cannot be queried has failed, and other ranks may be waiting for this
            # rank.
            return _said_by(error)
        if deadline != self._deadline:
            return None  # another launch has begun in the meantime
        return f"an exchange {_late(self._seconds)}"

    def _end(self) -> None:
        reason = self._reason
        try:
            end = time.monotonic() + _PATIENCE
            # Wait here with a time limit, since destroy() would wait for kernels without one.
            while not reason and not self._through():
                time.sleep(0.01)
                if time.monotonic() > end:
                    reason = "it was closed while an exchange was under way"
        except Exception as error:
            reason = _said_by(error)
        if reason:
            self._communicator.abort(reason)
        else:
            with contextlib.suppress(RuntimeError):  # the communicator has been aborted already
                self._communicator.destroy()

    def _through(self) -> bool:
        if self._deadline in (None, self._settled):
            return True
        return not self._launching and self._finished()


def _late(seconds: float) -> str:
    return f"has not ended within {seconds:g} s; another rank may be gone"


def _said_by(error: Exception) -> str:
    return f"the communicator cannot be looked after: {type(error).__name__}: {error}"
