"""A function in its own thread, which no interrupt can lose."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Seconds between looks during a wait, in case an interrupted wait holds the latch.
_LOOK = 1.0


class Task:
    """A function that a thread calls once.

    An interrupted ``Thread.join`` takes the thread for one that has ended, an interrupted
    ``Thread.start`` does not tell whether there will be one, and an interrupted wait for an Event
    can leave its lock locked. So the thread and whoever gives it up agree on who was first, and
    the end is a flag, set before the latch is opened.

    Args:
        function: called once; it must not raise.
        name: the thread's.
        daemon: whether Python may exit while it runs.
    """

    def __init__(self, function: Callable[[], None], name: str, daemon: bool = False) -> None:
        self._function: Callable[[], None] | None = function
        self._first: dict[str, str] = {}  # its setdefault is atomic
        self._started = self._ended = False
        self._latch = threading.Lock()
        self._latch.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        """Start the thread; if that fails or is interrupted, `cancel` tells the outcome."""
        self._thread.start()
        self._started = True

    def cancel(self) -> bool:
        """Keep the function from being called if `start` has not returned.

        Returns:
            True if it will never be called; False if it may have begun.
        """
        return not self._started and self._first.setdefault("is", "nobody") == "nobody"

    def _run(self) -> None:
        if self._first.setdefault("is", "thread") != "thread":
            return
        function, self._function = self._function, None  # free it, as it may refer to this task
        try:
            if function is not None:
                function()
        finally:
            del function
            self._ended = True
            self._latch.release()

    def done(self) -> bool:
        """Return whether the function has returned or will never be called."""
        return self._ended or self._first.get("is") == "nobody"

    def wait(self) -> None:
        """Wait until `done`; an interrupted wait can be repeated."""
        self.cancel()
        while not self.done():
            if self._latch.acquire(timeout=_LOOK):
                self._latch.release()
