"""Runs a function in a new thread whose state is known even after an interrupt."""

from __future__ import annotations

import threading
from collections.abc import Callable

# Interval in seconds at which `wait` polls the flags, since an interrupted wait may leave the latch
# locked forever.
_LOOK = 1.0


class Task:
    """A function that is called once, in a new thread.

    The methods of ``threading`` are unreliable after an interrupt: ``Thread.join`` treats a running
    thread as ended, ``Thread.start`` may or may not have started a thread, and a wait for an Event
    can leave the Event's lock locked. Therefore the thread and `cancel` record which of them came
    first. The function's end is marked by a flag, which is set before the latch is released.

    Args:
        function: called once; it must not raise.
        name: name of the thread.
        daemon: whether Python may exit while the function runs.
    """

    def __init__(self, function: Callable[[], None], name: str, daemon: bool = False) -> None:
        self._function: Callable[[], None] | None = function
        self._first: dict[str, str] = {}  # a dict, since its setdefault is atomic
        self._started = self._ended = False
        self._latch = threading.Lock()
        self._latch.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)

    def start(self) -> None:
        """Start the thread. If that fails or is interrupted, call `cancel` to learn the outcome."""
        self._thread.start()
        self._started = True

    def cancel(self) -> bool:
        """Prevent the function from being called, provided that `start` has not returned.

        Returns:
            True if the function will never be called; False if it may have been called.
        """
        return not self._started and self._first.setdefault("is", "nobody") == "nobody"

    def _run(self) -> None:
        if self._first.setdefault("is", "thread") != "thread":
            return
        function, self._function = self._function, None  # break a possible reference cycle
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
        """Wait until `done` returns True; an interrupted wait can be repeated."""
        self.cancel()
        while not self.done():
            if self._latch.acquire(timeout=_LOOK):
                self._latch.release()
