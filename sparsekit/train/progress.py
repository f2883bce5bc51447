"""Shows the progress of an epoch in one line."""

import sys
import time
from collections.abc import Callable
from typing import TextIO

# Minimum seconds between updates of a bar on a terminal, and between lines in a file or pipe.
REFRESH_S = 0.1
LINE_S = 30.0


class Progress:
    """A progress bar on a terminal; in a file or pipe, a line every half minute.

    `finish` replaces the bar with a final line.

    Args:
        title: start of the line.
        total: total number of samples; 0 if unknown.
        stream: stream to write to; None means ``sys.stderr``.
        unit: plural word for the things that are counted.
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
        """Continue an epoch: add the samples already done, and the seconds that they took."""
        self.done = done
        self._start -= seconds

    @property
    def seconds(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    def update(self, samples: int, loss: Callable[[], float] | None = None) -> None:
        """Add to the number of samples done; call ``loss`` only when the line is updated."""
        self.done += samples
        if time.perf_counter() - self._shown < (REFRESH_S if self.live else LINE_S):
            return
        self._shown = time.perf_counter()
        part = f" of {self.total:,}" if self.total else ""
        counted = f"{self.done:,}{part}"
        if self.live and self.total:
            filled = 20 * self.done // self.total
            counted = f"[{'#' * filled}{'.' * (20 - filled)}]"
        shown = "" if loss is None else f" loss {loss():.4f} "
        rate = f"{self.done / self.seconds:,.0f} {self.unit}/s"
        begin, end = ("\r\033[K", "") if self.live else ("", "\n")
        self.stream.write(f"{begin}{self.title} {counted}{shown} {rate}{end}")
        self.stream.flush()

    def finish(self, text: str) -> None:
        """Replace the bar with a line that consists of the title and this text."""
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
        # Remove the bar, so that an error message begins on an empty line.
        self.clear()
