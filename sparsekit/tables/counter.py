"""Counts changes, so that a cache can tell whether its content is still valid."""


class Counter:
    """Counts changes in all tables of the process."""

    def __init__(self) -> None:
        self.count = 0

    def next(self) -> int:
        """Count a change, and return the count."""
        self.count += 1
        return self.count
