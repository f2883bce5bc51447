"""A parser of arguments whose errors are one line, with the nearest right name."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterator
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """As argparse's, whose errors come after the whole usage and do not say what is near."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        wrong = re.search(r"(?:unrecognized arguments: |invalid choice: ')([^\s'=]+)", message)
        near = difflib.get_close_matches(wrong[1], set(self._names()), 1) if wrong else []
        hint = f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"{self.prog}: {message}{hint} (see {self.prog} --help)\n")

    def _names(self) -> Iterator[str]:
        """Options, commands and choices, those of commands too: their flags are refused here."""
        for action in self._actions:
            yield from action.option_strings
            yield from map(str, action.choices or ())
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from command._names()
