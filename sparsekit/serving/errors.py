"""Error types of serving; importable without torch."""


class SnapshotError(RuntimeError):
    """Raised when a file is damaged, missing from a sequence, or newer than this library.

    The message names the file. An open snapshot continues to serve its last good version.
    """


class LogError(RuntimeError):
    """Raised when a delta log cannot be written or compacted; the message names the file."""


class BusyError(RuntimeError):
    """Raised when a snapshot cannot be closed or changed because versions of it are pinned."""


class UnknownKeyError(KeyError):
    """Raised when a key is not in a table that refuses unknown keys (``miss="error"``)."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would show the message's repr
