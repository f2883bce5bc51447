"""Replaces hypothesis where it is missing and cannot be installed, as in gpu_check.sh.

A test under `given` runs on a fixed number of random examples, the same ones every time. Unlike
hypothesis, this does not reduce a failing example to a small one; so this folder is on the path
only if the real package is missing.
"""

import functools
import inspect
import random
from collections.abc import Callable
from typing import Any

from . import strategies

__all__ = ["HealthCheck", "given", "settings", "strategies"]


class HealthCheck:
    """Setting that is accepted and ignored."""

    too_slow = None


class settings:
    """Settings of a test; only the number of examples is used."""

    max_examples = 50
    _profiles: dict[str, int] = {}  # noqa: RUF012

    def __init__(self, max_examples: int | None = None, **_: Any) -> None:
        self.own = max_examples

    def __call__(self, test: Callable[..., Any]) -> Callable[..., Any]:
        test.max_examples = self.own  # type: ignore[attr-defined]
        return test

    @classmethod
    def register_profile(cls, name: str, *, max_examples: int = 50, **_: Any) -> None:
        cls._profiles[name] = max_examples

    @classmethod
    def load_profile(cls, name: str) -> None:
        cls.max_examples = cls._profiles[name]


def given(*positional: Any, **named: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test on examples; positional strategies are for its last parameters."""

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        parameters = list(inspect.signature(test).parameters.values())
        last = [p.name for p in parameters[len(parameters) - len(positional) :]]
        drawn = {**dict(zip(last, positional, strict=True)), **named}

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            examples = getattr(run, "max_examples", None) or settings.max_examples
            for number in range(examples):
                source = random.Random(f"{test.__qualname__} {number}")
                example = {name: strategy.draw(source) for name, strategy in drawn.items()}
                try:
                    test(**fixtures, **example)
                except Exception as error:
                    if hasattr(error, "add_note"):  # since Python 3.11
                        error.add_note(f"example {number}: {example}")
                    raise

        # pytest reads the fixtures from this signature.
        del run.__wrapped__  # type: ignore[attr-defined]
        run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [p for p in parameters if p.name not in drawn]
        )
        return run

    return decorate
