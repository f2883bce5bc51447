"""An argument parser whose errors are one line and suggest the nearest valid name."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Any, NoReturn

from ._nearest import did_you_mean


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Appends default values to the help, except None and, for switches, False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        silent = action.default is None or action.default is False
        return action.help if silent else super()._get_help_string(action)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints one-line errors instead of the whole usage."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        hint = did_you_mean(wrong[1], self._names(wrong[1].startswith("-"))) if wrong else ""
        self.exit(2, f"{self.prog}: {message}{hint} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse like argparse, but let each subcommand report its own missing arguments."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def knows(self, option: str) -> bool:
        """Return whether `option` is an option's name or an abbreviation of one."""
        return any(name.startswith(option) for name in self._names(True))

    def _names(self, options: bool) -> Iterator[str]:
        for action in self._actions:
            yield from action.option_strings if options else map(str, action.choices or ())
