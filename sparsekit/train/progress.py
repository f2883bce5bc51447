"""One line about how far an epoch is."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

REFRESH_S = 0.1


class Progress:
    """A bar that is rewritten in place on a terminal, and nothing but its last line elsewhere.

    Args:
        title: what the line begins with.
        total: samples to come; 0 if nobody knows.
        stream: where to write; None means ``sys.stderr``.
        unit: what samples are called.
    """

    def __init__(
        self, title: str, total: int, stream: TextIO | None = None, unit: str = "samples"
    ) -> None:
        self.title = title
        self.total = total
        self.unit = unit
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty()
        self.done = 0
        self._start = self._shown = time.perf_counter()

    def go_on(self, done: int, seconds: float) -> None:
        """Begin with samples that took some seconds before."""
        self.done = done
        self._start -= seconds

    @property
    def seconds(self) -> float:
        """Since the start."""
        return time.perf_counter() - self._start

    def update(self, samples: int, loss: Callable[[], float] | None = None) -> None:
        """Count samples; loss is asked for only when the line is rewritten."""
        self.done += samples
        if self.live and time.perf_counter() - self._shown >= REFRESH_S:
            self._shown = time.perf_counter()
            filled = 20 * self.done // self.total if self.total else 0
            bar = f"[{'#' * filled}{'.' * (20 - filled)}]" if self.total else f"{self.done:,}"
            rate = self.done / self.seconds
            shown = "" if loss is None else f" loss {loss():.4f} "
            self.stream.write(f"\r\033[K{self.title} {bar}{shown} {rate:,.0f} {self.unit}/s")
            self.stream.flush()

    def finish(self, text: str) -> None:
        """Put a line with the title and text in place of the bar."""
        self.clear()
        self.stream.write(f"{self.title} {text}\n")
        self.stream.flush()

    def clear(self) -> None:
        """Remove the bar."""
        if self.live:
            self.stream.write("\r\033[K")
            self.stream.flush()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        # Whatever ended the block, an error message for instance, gets a line of its own.
        self.clear()
